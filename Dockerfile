# An image for machines with NVIDIA GPUs. It was not built where the tests ran: no container engine is there.
# Ranks need shared memory, and an RDMA network its devices and locked memory:
#     docker run --gpus all --ipc host --network host --device /dev/infiniband --ulimit memlock=-1 IMAGE paceline ...
FROM nvidia/cuda:12.8.1-cudnn-runtime-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc \
    && rm -rf /var/lib/apt/lists/*
COPY . /opt/paceline/source
RUN python3 -m venv /opt/paceline/env \
    && /opt/paceline/env/bin/pip install --no-cache-dir -c /opt/paceline/source/constraints.txt '/opt/paceline/source[s3]'
ENV PATH=/opt/paceline/env/bin:$PATH
CMD ["paceline", "--help"]
