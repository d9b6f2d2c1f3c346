"""Our kernels against torch's, twice differentiated; and when they are used."""

from __future__ import annotations

import copy
import itertools
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import tiny
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import dynafed
from dynafed import Config, execution, kernels, tracing, tree
from dynafed.config import KERNELS_VERSION
from dynafed.engine.federation import Federation
from dynafed.engine.files import has_locks, lock_folder
from dynafed.kernels import blocks, build, levels, ops
from dynafed.kernels.mlp import MLPTraining
from dynafed.models import ConvNetSettings, MLPSettings, convnet, mlp
from dynafed.optim import Optimizer
from dynafed.synthesis import DynaFedSettings, matching_gradient, synthesize
from dynafed.tracing import StepTracer, trace_function
from dynafed.tree import Tree

needs_compiler = pytest.mark.skipif(build.library() is None, reason="no C++ compiler here")


def doubles(*shapes: tuple[int, ...]) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in shapes]


def accelerated(model: nn.Module) -> nn.Module:
    found = kernels.accelerate(model)
    assert found is not None
    return found


def images(count: int, *shape: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(count, *shape)).astype(np.float32)), torch.arange(count) % 3
    return (x, y), (x[:12], y[:12])


@needs_compiler
@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("padding", [1, 3])
def test_the_convolution_and_its_two_derivatives_are_torchs(channels: int, padding: int) -> None:
    x, weight, bias = doubles((2, channels, 5, 4), (8, channels, 3, 3), (8,))
    geometry = ops.Geometry((padding, padding))
    ours = ops.convolution(x, weight, bias, geometry)
    torch.testing.assert_close(ours, torch.conv2d(x, weight, bias, padding=padding))
    inputs = (x, weight, bias)
    assert gradcheck(lambda *given: ops.convolution(*given, geometry), inputs, fast_mode=True)
    assert gradgradcheck(lambda *given: ops.convolution(*given, geometry), inputs, fast_mode=True)


@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "geometry"),
    [
        ((1, 1), ops.Geometry((0, 0), (2, 2))),
        ((3, 3), ops.Geometry((1, 1), (2, 2))),
        ((5, 3), ops.Geometry((2, 0), (1, 2), groups=2)),
        ((3, 2), ops.Geometry((2, 1), dilation=(2, 1))),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_convolutions_of_any_geometry_are_torchs(kernel: tuple[int, int], geometry: ops.Geometry, biased: bool) -> None:
    x, weight, bias = doubles((2, 4, 7, 6), (6, 4 // geometry.groups, *kernel), (6,))
    inputs = (x, weight, *([bias] if biased else []))

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.convolution(x, weight, bias, geometry)

    torch.testing.assert_close(ours(*inputs), geometry.convolve(*inputs))
    assert gradcheck(ours, inputs, fast_mode=True)
    assert gradgradcheck(ours, inputs, fast_mode=True)


@needs_compiler
@pytest.mark.parametrize("channels", [8, 16])
def test_norm_relu_pool_and_its_two_derivatives_are_torchs(channels: int) -> None:
    inputs = doubles((2, channels, 4, 6), (channels,), (channels,))

    def ours(z: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return ops.norm_relu_pool(z, gamma, beta, 1e-5)

    z, gamma, beta = inputs
    torch.testing.assert_close(ours(*inputs), F.avg_pool2d(F.relu(F.group_norm(z, channels, gamma, beta)), 2))
    assert gradcheck(ours, inputs, fast_mode=True)
    assert gradgradcheck(ours, inputs, fast_mode=True)


@needs_compiler
@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize(("size", "padding"), [((4, 6), 1), ((6, 10), 3), ((5, 4), 1)])
@pytest.mark.parametrize("by_image", [True, False])
def test_a_block_and_its_two_derivatives_are_torchs(
    channels: int, size: tuple[int, int], padding: int, by_image: bool
) -> None:
    inputs = doubles((2, channels, *size), (16, channels, 3, 3), (16,), (16,), (16,))
    inputs[0].requires_grad_(by_image)

    def ours(*given: Tensor) -> Tensor:
        return ops.block(*given, padding)

    x, weight, bias, gamma, beta = inputs
    z = torch.conv2d(x, weight, bias, padding=padding)
    torch.testing.assert_close(ours(*inputs), F.avg_pool2d(F.relu(F.group_norm(z, 16, gamma, beta)), 2))
    assert gradcheck(ours, inputs, fast_mode=True)
    assert gradgradcheck(ours, inputs, fast_mode=True)


def matched(shape: tuple[int, ...], dtype: torch.dtype, own: bool, **how: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    model = convnet(shape, 4, ConvNetSettings(width=16, depth=2)).to(dtype)
    if own:
        model = accelerated(model)
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    target = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in start.items()}
    x, y = torch.randn(10, *shape, dtype=dtype), torch.randn(10, 4, dtype=dtype)
    return matching_gradient(model, start, target, x, y, 0.05, 4, **how)


@needs_compiler
def test_gradients_that_lie_nowhere_are_differentiated_as_well() -> None:
    """Those of a sum are one number, spread out."""
    for channels in (3, 16):
        given = doubles((2, channels, 4, 6), (16, channels, 3, 3), (16,), (16,), (16,))

        def twice(block: Callable[..., Tensor], given: list[Tensor] = given) -> list[Tensor]:
            first = torch.autograd.grad(block(*given).square().sum(), given, create_graph=True)
            return list(torch.autograd.grad(sum(map(torch.sum, first), torch.zeros(())), given))

        def theirs(x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
            return F.avg_pool2d(F.relu(F.group_norm(torch.conv2d(x, weight, bias, padding=1), 16, gamma, beta)), 2)

        for ours, expected in zip(twice(lambda *given: ops.block(*given, 1)), twice(theirs), strict=True):
            torch.testing.assert_close(ours, expected)


@needs_compiler
def test_a_network_that_was_moved_leaves_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = convnet((1, 8, 8), 3, ConvNetSettings(width=16, depth=1)), torch.randn(2, 1, 8, 8)
    expected = model(x)
    model = accelerated(model)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(
        copy.deepcopy(model).to(torch.bfloat16)(x.bfloat16()).float(), expected, rtol=0.1, atol=0.1
    )
    with pytest.raises(RuntimeError, match="type"):
        model(x.double())
    monkeypatch.setattr(blocks, "library", lambda: None)
    torch.testing.assert_close(model(x), expected)


@needs_compiler
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 8, 8), (3, 10, 10)])
def test_matching_on_our_kernels_is_the_same(shape: tuple[int, ...], dtype: torch.dtype, close: float) -> None:
    for ours, theirs in zip(matched(shape, dtype, True), matched(shape, dtype, False), strict=True):
        assert (ours - theirs).norm() <= close * theirs.norm()


@needs_compiler
@pytest.mark.parametrize("own", [True, False])
def test_the_number_of_threads_changes_no_bit_of_the_matching(own: bool) -> None:
    one, three = (matched((3, 8, 8), torch.float32, own, threads=threads, chunk=3) for threads in (1, 3))
    assert all(map(torch.equal, one, three))


def run(folder: Path, **changes: object) -> Tree:
    train, test = images(60, 1, 8, 8)
    given = {"model": "convnet", "convnet.width": 16, "convnet.depth": 2, "kernels": "own", "rounds": 3} | changes
    result = dynafed.run(tiny().replace(**given), train=train, test=test, out=folder)
    return {name: tensor.detach() for name, tensor in result.model.state_dict().items()}


@needs_compiler
@pytest.mark.parametrize("method", ["fedavg", "fedmix", "dynafed"])
def test_runs_on_our_kernels_have_the_same_bits_however_they_are_executed(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, object] = {"method": method}
    if method == "dynafed":
        section = {"trajectory": 2, "segment": 1, "targets": [1], "iterations": 2, "inner_steps": 2, "samples": 6}
        changes |= {f"dynafed.{key}": value for key, value in section.items()}
    plain = run(tmp_path / "plain", workers=1, record=False, **changes)
    monkeypatch.setattr(StepTracer.__init__, "__defaults__", (1, True))
    monkeypatch.setattr(execution, "MIN_TRACED_STEPS", 0)
    replays: list[object] = []
    monkeypatch.setattr(tracing, "trace_function", lambda *given: replays.append(trace_function(*given)) or replays[-1])
    for workers in (1, 2):
        for name, tensor in run(tmp_path / f"workers-{workers}", workers=workers, **changes).items():
            assert torch.equal(tensor, plain[name])
    train, test = images(60, 1, 8, 8)
    run(tmp_path / "part", workers=2, **changes | {"rounds": 2})
    resumed = dynafed.resume(tmp_path / "part", changes={"rounds": 3}, train=train, test=test)
    assert resumed.federation.execution.kernels
    assert all(torch.equal(tensor, plain[name]) for name, tensor in resumed.model.state_dict().items())
    assert replays
    assert None not in replays
    theirs = run(tmp_path / "torch", kernels="torch", **changes)
    assert any(not torch.equal(tensor, theirs[name]) for name, tensor in plain.items())
    for name, tensor in plain.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-2, atol=1e-2)


def half_frozen(shape: tuple[int, ...], classes: int) -> nn.Module:
    model = mlp(shape, classes, MLPSettings(width=16))
    model.head.requires_grad_(False)
    return model


@needs_compiler
def test_an_mlp_of_which_a_part_is_frozen_trains_the_rest(tmp_path: Path) -> None:
    train, test = images(60, 1, 8, 8)
    ends = [
        dynafed.run(tiny(kernels=kernels), model=half_frozen, train=train, test=test, out=tmp_path / kernels).model
        for kernels in ("own", "torch")
    ]
    for ours, theirs in zip(*(model.state_dict().values() for model in ends), strict=True):
        assert torch.equal(ours, theirs)  # torch's kernels both times


@pytest.fixture
def no_library() -> Iterator[None]:
    build.library.cache_clear()
    yield
    build.library.cache_clear()


@pytest.fixture
def cache(no_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user's cache with nothing in it, a package without a library, and a compiler in a hurry."""
    without_prebuilt(monkeypatch, tmp_path / "package")
    monkeypatch.setattr(levels, "FLAGS", ("-O0", "-shared", "-fPIC"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dynafed"


def without_prebuilt(monkeypatch: pytest.MonkeyPatch, package: Path) -> None:
    """Let the kernels' folder be one with nothing but the sources."""
    package.mkdir()
    for name in levels.SOURCES:
        shutil.copy(build.FOLDER / name, package)
    monkeypatch.setattr(build, "FOLDER", package)


@pytest.mark.usefixtures("cache")
def test_without_a_compiler_torchs_kernels_are_used_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    model = convnet((1, 8, 8), 3, ConvNetSettings(width=16, depth=1))
    assert kernels.accelerate(model) is None
    assert kernels.accelerate(model) is None
    assert [line.levelname for line in caplog.records] == ["WARNING"]
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 3)


@needs_compiler
def test_a_compiler_that_fails_is_no_catastrophe(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(levels, "FLAGS", ("--no-such-flag",))
    assert build.library() is None
    assert "don't compile here" in caplog.text
    assert not list(cache.glob("*"))


@pytest.mark.skipif(not has_locks(), reason="needs locks")
def test_the_folder_of_a_killed_compilation_goes_with_the_next_and_that_of_another_stays(tmp_path: Path) -> None:
    killed, at_work, new = (tmp_path / f"{build.WORK}{name}" for name in ("killed", "at-work", "new"))
    for folder in (killed, at_work, new):
        folder.mkdir()
    (killed / ".lock").touch()
    with lock_folder(at_work):
        build._remove_leftovers(tmp_path)
    assert {folder.name for folder in tmp_path.iterdir()} == {at_work.name, new.name}


@needs_compiler
def test_what_was_compiled_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert build.library() is not None
    (made,) = cache.glob("*")
    written = made.stat().st_mtime_ns
    build.library.cache_clear()
    assert build.library() is not None
    assert made.stat().st_mtime_ns == written
    damaged = tmp_path / "other" / "dynafed" / made.name
    damaged.parent.mkdir(parents=True, mode=0o700)
    damaged.write_bytes(made.read_bytes()[:-5000])  # to load it would end the process
    damaged.chmod(0o600)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    build.library.cache_clear()
    assert build.library() is not None
    assert damaged.stat().st_size == made.stat().st_size


def hanging_compiler(folder: Path) -> tuple[Path, Path]:
    """A compiler that doesn't end, and the file in which it writes the number of the process that it started."""
    compiler, pid = folder / "c++", folder / "pid"
    compiler.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit 0\nsleep 1000 & echo $! > {pid}; wait\n")
    compiler.chmod(0o700)
    return compiler, pid


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.05)
    assert condition()


def has_ended(pid: str) -> bool:
    try:
        return "(zombie)" in (Path("/proc") / pid.strip() / "status").read_text()
    except OSError:
        return True


def test_a_compiler_that_hangs_ends_with_its_children(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, pid = hanging_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(hanging))
    monkeypatch.setattr(build, "TIMEOUT", 1)
    assert build.library() is None
    assert not list(cache.glob("*"))
    wait_for(lambda: has_ended(pid.read_text()))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_compiler_ends_with_its_children_when_we_are_killed(tmp_path: Path) -> None:
    hanging, pid = hanging_compiler(tmp_path)
    code = "import sys; from dynafed.kernels import build; build._run(sys.argv[1:])"
    with subprocess.Popen([sys.executable, "-c", code, str(hanging), "-O3"]) as ours:
        wait_for(lambda: pid.exists() and bool(pid.read_text().strip()))
        assert not has_ended(pid.read_text())
        ours.kill()
    wait_for(lambda: has_ended(pid.read_text()))


@pytest.fixture
def prebuilt(cache: Path) -> Path:
    """A library in the package."""
    compiler, level = levels.find_compiler(), levels.own_level()
    assert compiler is not None
    made = build.FOLDER / levels.library_name(levels.read_sources(build.FOLDER), level)
    subprocess.run(levels.compile_command(compiler, level, str(made)), cwd=build.FOLDER, check=True)
    levels.seal(made)
    made.chmod(0o755)
    return made


@needs_compiler
def test_the_package_s_library_is_taken_if_it_is_whole_and_nobody_else_writes_to_it(
    prebuilt: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded() -> str | None:
        build.library.cache_clear()
        found = build.library()
        return found._name if found else None

    def rewritten(content: bytes) -> None:
        prebuilt.unlink()  # it is loaded
        prebuilt.write_bytes(content)
        prebuilt.chmod(0o755)

    monkeypatch.setattr(levels, "find_compiler", lambda: None)
    assert loaded() == str(prebuilt)
    assert not cache.exists()
    for mode in (0o775, 0o757):
        prebuilt.chmod(mode)
        assert loaded() is None
    prebuilt.chmod(0o755)
    prebuilt.parent.chmod(0o777)
    assert loaded() is None
    prebuilt.parent.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        assert bool(loaded()) == (prebuilt.stat().st_uid == 0)  # root may have installed it
    whole = prebuilt.read_bytes()
    rewritten(whole[:-5000])  # to load it would end the process
    assert loaded() is None
    rewritten(whole)
    assert loaded() == str(prebuilt)
    (prebuilt.parent / "mlp.cpp").write_text("// other sources\n")
    assert loaded() is None


@needs_compiler
def test_a_library_of_the_package_and_one_of_the_cache_give_the_same_bits(
    prebuilt: Path, cache: Path, tmp_path: Path
) -> None:
    def bits() -> str:
        train, test = images(60, 1, 8, 8)
        config = tiny(kernels="own", rounds=1).replace(**{"mlp.width": 16})
        folder = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        return tree.digest(dynafed.run(config, train=train, test=test, out=folder).state.model)

    first, loaded = bits(), build.library()
    assert loaded
    assert loaded._name == str(prebuilt)
    prebuilt.unlink()
    build.library.cache_clear()
    assert bits() == first
    assert [file.suffix for file in cache.iterdir()] == [".so"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_level_is_the_highest_that_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    third, fourth = levels.ABOVE["x86-64-v3"], levels.ABOVE["x86-64-v4"]
    monkeypatch.setattr(levels, "machine", lambda: "x86_64")
    for flags, level in (
        (f"fpu {third} {fourth} vaes", "x86-64-v4"),
        (f"{third} avx512f avx512bw", "x86-64-v3"),
        (f"{fourth} avx avx2", "x86-64"),
        ("", "x86-64"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", lambda file, flags=flags: f"processor : 0\nflags\t\t: {flags}\n")
            assert levels.own_level() == level
    monkeypatch.setattr(levels, "machine", lambda: "aarch64")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda file: "Features : fp asimd\n")
        assert levels.own_level() == "armv8-a"


@needs_compiler
@pytest.mark.skipif(not levels.prebuilt_levels(), reason="no library is built for such machines")
def test_a_wheel_brings_the_library(tmp_path: Path) -> None:
    """Built offline, from a copy of the project, with fewer levels and no optimization: that takes the time."""
    copied = tmp_path / "project"
    project = Path(__file__).parents[2]
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        copied.mkdir(exist_ok=True)
        shutil.copy(project / name, copied)
    shutil.copytree(project / "src", copied / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    described = copied / "src/dynafed/kernels/levels.py"
    described.write_text(described.read_text().replace('"-O3"', '"-O0"').replace("tuple(ABOVE)", "(own_level(),)"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(copied)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path / "installed")
    code = "from dynafed.kernels import build; print(build.library()._name)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "DYNAFED_CACHE": str(tmp_path / "cache")}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert Path(said.stdout.strip()).parent == tmp_path / "installed/dynafed/kernels"
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_nothing_is_run_that_somebody_else_may_have_put_there(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    assert build.library() is None
    assert "others can write to" in caplog.text
    file = tmp_path / "file"
    file.touch(0o600)
    assert build._nobody_else_writes(file)
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    assert not build._nobody_else_writes(file)


@needs_compiler
def test_a_run_on_our_kernels_is_not_resumed_on_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "run")
    monkeypatch.setattr(kernels, "library", lambda: None)
    train, test = images(60, 1, 8, 8)
    with pytest.raises(dynafed.UserError, match=r"install a C\+\+ compiler"):
        dynafed.resume(tmp_path / "run", changes={"rounds": 4}, train=train, test=test)


@needs_compiler
def test_it_is_the_work_that_decides() -> None:
    train, test = images(60, 1, 8, 8)
    small = tiny().replace(**{"model": "convnet", "convnet.width": 16, "convnet.depth": 2, "rounds": 3})

    def own(config: Config) -> bool:
        federation = Federation.create(config, train=train, test=test)
        chosen = "own" if federation.execution.kernels else "torch"
        assert federation.config.kernels == chosen  # which is what a resumed run goes by
        return federation.execution.kernels

    assert not own(small)
    assert own(small.replace(rounds=100_000))
    assert own(small.replace(kernels="own"))
    assert not own(small.replace(rounds=100_000, kernels="torch"))
    assert own(small.replace(method="dynafed", **{"dynafed.iterations": 10_000}))
    assert not own(small.replace(kernels="own", **{"convnet.norm": "batch"}))
    assert not own(small.replace(kernels="own", **{"convnet.width": 12, "kernels_version": 1}))
    assert own(small.replace(kernels="own", **{"convnet.width": 12}))
    many = tiny().replace(**{"model": "mlp", "mlp.width": 16, "rounds": 1_000_000})
    assert own(many)
    assert own(many.replace(method="fedprox"))
    assert own(many.replace(optimizer="sgd"))
    assert not own(many.replace(rounds=3, method="fedprox"))
    assert not own(many.replace(rounds=1000, local_steps=1, batch_size=10_000))  # a client hasn't as many samples


def test_short_runs_record_nothing() -> None:
    train, test = images(60, 1, 8, 8)

    def records(**changes: object) -> bool:
        return Federation.create(tiny().replace(**changes), train=train, test=test).execution.trace

    assert not records()
    assert records(rounds=1_000_000)
    assert not records(rounds=1_000_000, record=False)
    assert records(method="feddf", server_samples=6)  # the server takes thousands of steps


@needs_compiler
def test_a_synthesis_alone_decides_for_itself_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convnet((1, 8, 8), 3, ConvNetSettings(width=16, depth=1))
    start = {name: tensor.detach() for name, tensor in model.named_parameters()}
    walk = [{name: tensor + 0.01 * step for name, tensor in start.items()} for step in range(4)]
    settings = DynaFedSettings(segment=1, targets=(1,), iterations=1, inner_steps=1, samples=4, inner_lr=0.1)
    built: list[nn.Module | None] = []
    accelerate = kernels.accelerate
    monkeypatch.setattr(kernels, "accelerate", lambda *given: built.append(accelerate(*given)) or built[-1])
    synthesize(model, walk, (1, 8, 8), 3, settings)
    assert not built
    monkeypatch.setattr(execution, "MIN_KERNEL_WORK", 1)
    synthesize(model, walk, (1, 8, 8), 3, settings)
    synthesize(model, walk, (1, 8, 8), 3, settings, accelerate=False)
    assert len(built) == 1
    assert type(model.features) is nn.Sequential


def test_other_networks_have_no_part_for_our_kernels() -> None:
    for network, shape in ((nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU()), (1, 8, 8)), (nn.Linear(3, 2), (3,))):
        assert kernels.coverage(network, torch.randn(1, *shape)) == kernels.Coverage(0)


def layers(sizes: tuple[int, ...]) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    params = []
    for wide, out in itertools.pairwise(sizes):
        params += [torch.randn(wide, out, generator=rng).t() / wide**0.5, torch.randn(out, generator=rng)]
    return params


@needs_compiler
@pytest.mark.parametrize("sizes", [(784, 128, 128, 10), (20, 16, 3), (7, 48, 32, 64, 100), (5, 4)])
@pytest.mark.parametrize(("batch", "name", "decay"), [(1, "adam", 0.0), (13, "adam", 0.1), (32, "adamw", 0.1)])
def test_the_mlp_takes_torchs_steps(sizes: tuple[int, ...], batch: int, name: str, decay: float) -> None:
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, sizes[0], generator=rng), torch.randint(sizes[-1], (40,), generator=rng)
    order = np.random.default_rng(0).permutation(40)[:35]
    params, leaves = layers(sizes), [tensor.clone().requires_grad_() for tensor in layers(sizes)]
    optimizer = Optimizer(name, params, 0.01, weight_decay=decay)
    train = MLPTraining(params, optimizer)
    losses = torch.cat([train(x, y, order, batch), train(x, y, order[:batch], batch)])
    theirs = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](leaves, 0.01, weight_decay=decay)
    wanted = []
    for some in [*torch.split(torch.from_numpy(order), batch), torch.from_numpy(order[:batch])]:
        z = x[some]
        for number, (weight, bias) in enumerate(zip(leaves[::2], leaves[1::2], strict=True)):
            z = F.linear(z.relu() if number else z, weight, bias)
        loss = F.cross_entropy(z, y[some])
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        wanted.append(loss.detach())
    torch.testing.assert_close(losses, torch.stack(wanted), rtol=1e-3, atol=1e-4)
    # Adam makes full steps of gradients that are nothing but rounding: few entries may differ, none by much.
    apart = torch.cat([(ours - one.detach()).abs().flatten() for ours, one in zip(params, leaves, strict=True)])
    assert apart.quantile(0.99) < 1e-4 if len(apart) < 100_000 else apart.mean() < 1e-4
    assert float(optimizer.moments["step"][0]) == len(wanted)


@needs_compiler
def test_the_mlps_kernel_refuses_what_it_would_misread() -> None:
    rows = [torch.randn(16, 8), torch.randn(16)]
    with pytest.raises(ValueError, match="column-major"):
        MLPTraining(rows, Optimizer("adam", rows, 0.1))
    params = layers((8, 16))
    train = MLPTraining(params, Optimizer("adam", params, 0.1))
    for x in (torch.randn(2, 7), torch.randn(8, 2).t()):
        with pytest.raises(ValueError, match="be contiguous"):
            train(x, torch.zeros(2, dtype=torch.long), np.arange(2), 2)
    # A batch that is larger than there are samples takes no more memory than they need.
    assert train(torch.randn(2, 8), torch.zeros(2, dtype=torch.long), np.arange(2), 10**12).shape == (1,)


@needs_compiler
@pytest.mark.parametrize("method", ["fedavg", "abavg"])
def test_the_mlp_trains_on_our_kernel_as_on_torchs(method: str, tmp_path: Path) -> None:
    changes: dict[str, object] = {"model": "mlp", "mlp.width": 16, "method": method, "local_epochs": 2}
    if method == "abavg":
        changes["server_samples"] = 6
    one, two = (run(tmp_path / str(workers), workers=workers, **changes) for workers in (1, 2))
    theirs = run(tmp_path / "torch", kernels="torch", **changes)
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name])
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)
    watched = run(tmp_path / "watched", workers=1, watch=[0, 1], **changes)
    assert all(torch.equal(tensor, watched[name]) for name, tensor in one.items())
    assert any(not torch.equal(tensor, theirs[name]) for name, tensor in one.items())


class Ends(nn.Module):
    """A network of the user's own, with blocks inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(16, 16), nn.ReLU(), nn.AvgPool2d(2), nn.Dropout(0.0)
        )
        self.out = nn.Sequential(nn.Flatten(), nn.Linear(16 * 16, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.stem(x))
        return out


@needs_compiler
def test_a_user_s_own_network_is_accelerated_by_its_structure() -> None:
    network, x = Ends(), torch.randn(5, 3, 8, 8)
    assert kernels.coverage(network, x[:1]) == kernels.Coverage(16)
    fast = accelerated(network)
    assert type(network.stem) is nn.Sequential
    assert isinstance(fast.get_submodule("stem"), blocks.ConvBlocks)
    assert list(fast.state_dict()) == list(network.state_dict())
    torch.testing.assert_close(fast(x), network(x))
    alone = nn.Sequential(*network.stem)
    torch.testing.assert_close(accelerated(alone)(x), alone(x))


def test_what_looks_alike_but_is_not_is_left_to_torch() -> None:
    conv, norm = nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(16, 16)
    for layers in (
        (nn.Conv2d(1, 16, 3, padding=1, stride=2), norm, nn.ReLU(), nn.AvgPool2d(2)),
        (nn.Conv2d(1, 16, 5, padding=1), norm, nn.ReLU(), nn.AvgPool2d(2)),
        (nn.Conv2d(1, 16, 3, padding=1, bias=False), norm, nn.ReLU(), nn.AvgPool2d(2)),
        (nn.Conv2d(1, 16, 3, padding=1, padding_mode="reflect"), norm, nn.ReLU(), nn.AvgPool2d(2)),
        (conv, nn.GroupNorm(4, 16), nn.ReLU(), nn.AvgPool2d(2)),
        (conv, nn.GroupNorm(16, 16, affine=False), nn.ReLU(), nn.AvgPool2d(2)),
        (conv, norm, nn.GELU(), nn.AvgPool2d(2)),
        (conv, norm, nn.ReLU(), nn.MaxPool2d(2)),
        (conv, norm, nn.ReLU(), nn.AvgPool2d(3)),
    ):
        assert kernels.coverage(nn.Sequential(*layers), torch.randn(1, 1, 8, 8), version=1).channels == 0
    hooked = nn.Sequential(conv, norm, nn.ReLU(), nn.AvgPool2d(2))
    hooked[0].register_forward_hook(lambda *_: None)
    assert kernels.coverage(hooked, torch.randn(1, 1, 8, 8)).channels == 0


def test_an_mlp_is_known_by_its_structure() -> None:
    def is_mlp(*layers: nn.Module, version: int = KERNELS_VERSION) -> bool:
        return bool(kernels.coverage(nn.Sequential(*layers), torch.randn(1, 8), version).mlp)

    first, last = nn.Linear(8, 16), nn.Linear(16, 3)
    assert is_mlp(nn.Flatten(), first, nn.ReLU(), last)
    assert is_mlp(nn.Sequential(first, nn.ReLU()), last)
    assert is_mlp(first, nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    assert not is_mlp(nn.Linear(8, 3))
    assert is_mlp(first, nn.Tanh(), last)
    assert not is_mlp(first, nn.Tanh(), last, version=4)
    assert not is_mlp(first, nn.Sigmoid(), last)
    assert not is_mlp(first, last)
    assert not is_mlp(first, nn.ReLU(), last, nn.ReLU())
    assert is_mlp(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    assert not is_mlp(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3), version=4)
    assert not is_mlp(nn.Linear(8, 16, bias=False), nn.ReLU(), last)
    assert not is_mlp(nn.Linear(8, 16).double(), nn.ReLU(), last.double())
    assert not is_mlp(shared := nn.Linear(16, 16), nn.ReLU(), shared)


@needs_compiler
def test_the_environment_overrides_the_choice_and_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = images(60, 1, 8, 8)
    config = tiny().replace(**{"mlp.width": 16, "rounds": 1})

    def chosen() -> str:
        return Federation.create(config, train=train, test=test).config.kernels

    assert chosen() == "torch"
    monkeypatch.setenv("DYNAFED_KERNELS", "own")
    assert chosen() == "own"
    monkeypatch.setenv("DYNAFED_KERNELS", "fast")
    with pytest.raises(dynafed.UserError, match="DYNAFED_KERNELS = 'fast' is not one of"):
        chosen()
    monkeypatch.setenv("DYNAFED_CACHE", str(tmp_path / "cache"))
    without_prebuilt(monkeypatch, tmp_path / "package")
    monkeypatch.setattr(levels, "FLAGS", ("-O0", "-shared", "-fPIC"))
    build.library.cache_clear()
    assert build.library() is not None
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".so"]
    build.library.cache_clear()
