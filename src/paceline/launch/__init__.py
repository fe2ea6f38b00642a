"""Launch jobs on several nodes, and manage them. Nothing here imports torch.

One launch, in the order of its calls:

    cli/launch.py           parses the command line into a typed spec (specs.py): SshSpec, SlurmSpec, Ec2Spec ...
    ssh.launch(spec)        the module of the backend makes a job of it (job.py); also local, slurm and ec2
    rendezvous.choose(job)  decides where the nodes find each other
    planning.plan(job)      returns the steps: files to copy and scripts to run on each host; --dry-run prints them
    execution.start(job)    executes the steps on all hosts (hosts.py); the last one starts node.sh (sessions.py)
    node.sh                 runs `paceline train recipe.yaml --nodes 1:2 --rendezvous ...` on its host
    cli/train.py            starts the ranks of that node (distributed/run.py), which train (engine/train.py)

lifecycle.py then follows the job: supervising.py prints its logs, restarting.py restarts lost nodes, fetching.py
copies the run folder back. manifest.py only plans: the engine of the user runs the file.
"""
