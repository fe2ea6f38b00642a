"""The private names of torch and torchvision still exist and do what Paceline needs; no other module uses any."""

import ast
import inspect
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import HANG
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch_changes import changed

from paceline.distributed.plan import interface_of
from paceline.system.norms import BATCH_NORMS, NORMS
from paceline.system.torch_internals import (
    abort_groups,
    augmentation_op,
    augmentation_space,
    copy_all_,
    expensive_operators,
    flight_records,
    on_compilation,
    record_memory,
    restart_group_names,
    write_memory_snapshot,
)
from paceline.system.torch_internals.operators import HostReads, OnlyCasts
from paceline.system.torchvision_compat import allow_torchvision

OPERATIONS = [
    *("Identity", "AutoContrast", "Equalize", "Brightness", "Color", "Contrast", "Sharpness", "Rotate"),
    *("TranslateX", "TranslateY", "ShearX", "ShearY", "Posterize", "Solarize"),
]
SOURCE = Path(__file__).parents[2] / "src" / "paceline"


def parameters(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_reads_of_the_host_are_observed() -> None:
    read: list[str] = []
    tensor = torch.arange(3.0)
    with HostReads(read.append):
        assert (tensor * 2).sum() is not None
        assert not read, changed("TorchDispatchMode")
        values = (
            tensor.sum().item(),
            torch.equal(tensor, tensor),
            len(tensor.nonzero()),
            len(tensor.masked_select(tensor > 0)),
        )
    assert values == (3.0, True, 2, 2)
    assert read[:3] == ["item", "equal", "nonzero"], changed("the operator of Tensor.item")
    assert read[3:] == ["masked_select"]


@pytest.mark.parametrize(
    ("use", "holds"),
    [
        (lambda tensor: tensor.bfloat16() + 1, True),
        (lambda tensor: tensor[:, 1:].T.bfloat16(), True),
        (lambda tensor: torch.ones(3) + 1, True),
        (lambda tensor: tensor + 1, False),
        (lambda tensor: tensor[:, 1:].T * 2, False),
        (lambda tensor: tensor.half(), False),
        (lambda tensor: torch.stack([torch.ones(3, 3), tensor]), False),
    ],
)
def test_casts_of_a_tensor_are_told_from_other_uses(use: Callable[[torch.Tensor], object], holds: bool) -> None:
    tensor = torch.ones(3, 3)
    with OnlyCasts(tensor, torch.bfloat16) as casts:
        use(tensor)
    assert casts.holds == holds, changed("TorchDispatchMode, OpOverload.is_view or aten._to_copy")


# ---- process groups ----


@pytest.fixture
def no_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface_of("127.0.0.1"))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_group")
def test_group_names_restart_after_a_group_that_failed() -> None:
    def join(size: int) -> str:
        timeout = timedelta(seconds=0.2 if size > 1 else 60)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=size, timeout=timeout)
        assert dist.group.WORLD
        return dist.group.WORLD.group_name

    assert hasattr(distributed_c10d._world, "group_count"), changed("distributed_c10d._world")
    restart_group_names()
    first = join(size=1)
    dist.destroy_process_group()
    with pytest.raises(RuntimeError):
        join(size=2)  # the other rank does not come
    assert distributed_c10d._world.group_count == 1, changed("distributed_c10d._world.group_count")
    restart_group_names()
    assert join(size=1) == first, changed("the names of process groups")


@pytest.mark.usefixtures("no_group")
def test_timeouts_of_process_groups_have_a_public_setter() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD
    dist.group.WORLD.set_timeout(timedelta(seconds=7))
    found = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    assert found == timedelta(seconds=7), changed("ProcessGroup.set_timeout")


@pytest.mark.usefixtures("no_group")
def test_all_groups_are_aborted_and_forgotten() -> None:
    assert hasattr(distributed_c10d, "_abort_process_group"), changed("distributed_c10d._abort_process_group")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    kept = dist.group.WORLD
    abort_groups()
    assert not dist.is_initialized(), changed("distributed_c10d._abort_process_group")
    assert kept is not None


@pytest.mark.usefixtures("no_group")
def test_the_flight_recorder_counts_collectives() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(2):
        dist.all_reduce(torch.ones(2))
    last = flight_records(collectives=True)["gloo"]["entries"][-1]

    def done() -> str:
        status = flight_records(collectives=False)["gloo"]["pg_status"][str(last["pg_id"])]
        assert status["last_enqueued_collective"] == "2", changed("flight recorder")
        return status["last_completed_collective"]

    deadline = time.monotonic() + HANG  # gloo's thread records the end after the collective has returned
    while done() != "2":
        assert time.monotonic() < deadline, changed("flight recorder")
        time.sleep(0.01)
    found = {name: last[name] for name in ("profiling_name", "collective_seq_id", "is_p2p")}
    expected = {"profiling_name": "gloo:all_reduce", "collective_seq_id": 2, "is_p2p": False}
    assert found == expected, changed("the flight recorder")


# ---- tensors ----


def test_lists_of_tensors_are_copied() -> None:
    assert hasattr(torch, "_foreach_copy_"), changed("torch._foreach_copy_")
    targets = [torch.zeros(3), torch.zeros(2, 2).t(), torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last)]
    sources = [torch.rand_like(target) for target in targets]
    copy_all_(targets, sources)
    assert all(map(torch.equal, targets, sources)), changed("torch._foreach_copy_")


def test_magnitudes_of_augmentation_policies_are_known() -> None:
    allow_torchvision()
    wide, rand = (augmentation_space(name, 50, 331) for name in ("trivialaugment", "randaugment"))
    assert sorted(wide) == sorted(rand) == sorted(OPERATIONS), changed("the operations of policies", "torchvision")
    assert wide["TranslateX"] == (pytest.approx([level * 32 / 30 for level in range(31)]), True)
    assert rand["TranslateX"] == (pytest.approx([level * 5 for level in range(31)]), True)
    assert wide["Equalize"] == rand["Equalize"] == ([0], False)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_augmentation_policies_change_images_as_named(name: str) -> None:
    allow_torchvision()
    from torchvision.transforms import autoaugment
    from torchvision.transforms import functional as F

    assert hasattr(autoaugment, "_apply_op"), changed("autoaugment._apply_op", "torchvision")
    names = ["img", "op_name", "magnitude", "interpolation", "fill"]
    assert parameters(autoaugment._apply_op) == names, changed("the parameters of _apply_op", "torchvision")
    image = torch.randint(40, 200, (3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = {
        "Identity": lambda: image,
        "AutoContrast": lambda: F.autocontrast(image),
        "Equalize": lambda: F.equalize(image),
        "Brightness": lambda: F.adjust_brightness(image, 1.5),
        "Color": lambda: F.adjust_saturation(image, 1.5),
        "Contrast": lambda: F.adjust_contrast(image, 1.5),
        "Sharpness": lambda: F.adjust_sharpness(image, 1.5),
        "Rotate": lambda: F.rotate(image, 4.0),
        "TranslateX": lambda: F.affine(image, 0.0, [4, 0], 1.0, [0.0, 0.0]),
        "TranslateY": lambda: F.affine(image, 0.0, [0, 4], 1.0, [0.0, 0.0]),
        "ShearX": lambda: F.affine(image, 0.0, [0, 0], 1.0, [26.565051177, 0.0], center=[0, 0]),
        "ShearY": lambda: F.affine(image, 0.0, [0, 0], 1.0, [0.0, 26.565051177], center=[0, 0]),
        "Posterize": lambda: F.posterize(image, 4),
        "Solarize": lambda: F.solarize(image, 120.0),
    }
    magnitudes = {"Rotate": 4.0, "TranslateX": 4.0, "TranslateY": 4.0, "Posterize": 4.0, "Solarize": 120.0}
    found = augmentation_op(image, name, magnitudes.get(name, 0.5), "nearest")
    assert torch.equal(found, expected[name]()), changed(f"_apply_op({name!r})", "torchvision")


def test_norms_are_all_that_torch_has() -> None:
    kinds = torch.nn.modules.batchnorm
    public = {kind for name, kind in vars(torch.nn).items() if isinstance(kind, type) and not name.startswith("Lazy")}
    batch_norms = {kind for kind in public if issubclass(kind, kinds._BatchNorm)}
    assert batch_norms == set(BATCH_NORMS), changed("its batch norms")
    norms = {kind for kind in public if issubclass(kind, kinds._NormBase)}
    assert norms < set(NORMS), changed("its batch and instance norms")


# ---- compiling, recomputing and profiling ----


def test_compilations_of_forward_and_backward_are_noticed() -> None:
    events: list[str] = []
    torch.compiler.reset()  # also forgets what to call
    on_compilation(lambda _: events.append("start"), lambda _: events.append("end"))
    function = torch.compile(lambda x: (x * 2).sin(), backend="aot_eager", dynamic=False)
    for size in (2, 2, 3):
        function(torch.ones(size, requires_grad=True)).sum().backward()
    assert events, changed("torch._dynamo.callback")
    assert events == ["start", "end"] * (len(events) // 2), changed("torch._dynamo.callback")
    before = len(events)
    function(torch.ones(3, requires_grad=True)).sum().backward()
    assert len(events) == before, "compiled again without a new shape"
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["flash_attention_for_cpu", "product"])
def test_operators_that_take_most_of_the_time_are_named(backend: str) -> None:
    """Those that attention and products really call here."""
    called = set()

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            called.add(func)
            return func(*args, **(kwargs or {}))

    with Note():
        if backend == "product":
            torch.nn.Linear(4, 4)(torch.ones(2, 4)) @ torch.ones(4, 2)
            torch.nn.Conv2d(1, 1, 1)(torch.ones(1, 1, 2, 2))
        else:
            torch.nn.functional.scaled_dot_product_attention(*(torch.ones(1, 2, 8, 16) for _ in range(3)))
    expected = {"addmm", "mm", "convolution"} if backend == "product" else {f"_scaled_dot_product_{backend}"}
    found = {operator.name().removeprefix("aten::") for operator in called & set(expensive_operators())}
    assert found == expected, changed("the operators of attention")


def test_memory_of_gpus_can_be_recorded(monkeypatch, tmp_path: Path) -> None:
    """What is called exists and takes these values; there is no GPU here."""
    memory = torch.cuda.memory
    assert parameters(memory._record_memory_history)[0] == "enabled", changed("_record_memory_history")
    assert parameters(memory._dump_snapshot)[0] == "filename", changed("_dump_snapshot")
    calls: list[object] = []
    monkeypatch.setattr(memory, "_record_memory_history", calls.append)
    monkeypatch.setattr(memory, "_dump_snapshot", calls.append)
    record_memory(True)
    write_memory_snapshot(tmp_path)
    record_memory(False)
    assert calls == ["all", str(tmp_path), None]


# ---- nothing else ----


def _private_names(path: Path) -> Iterator[str]:
    """Yield the private names of torch, torchvision and timm that a module imports or accesses."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted = [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dotted = [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
        else:
            continue
        for bound, name in dotted:
            if name.split(".")[0] in ("torch", "torchvision", "timm"):
                imported.add(bound)
                if _is_private(name):
                    yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.fullmatch(r"[\w.]+", name) and name.split(".")[0] in imported and _is_private(name):
                yield name


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_no_other_module_uses_private_names_of_torch() -> None:
    used = {path.relative_to(SOURCE).as_posix(): sorted(set(_private_names(path))) for path in SOURCE.rglob("*.py")}
    internals = [name for path in list(used) if path.startswith("system/torch_internals/") for name in used.pop(path)]
    assert "torch._foreach_copy_" in internals  # the check finds what it looks for
    assert not {path: names for path, names in used.items() if names}, "move these to system/torch_internals"
