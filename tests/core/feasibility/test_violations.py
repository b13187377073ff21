"""What can't be run: each rule refuses its case with a reason and a remedy, and lets the case beside it pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hotloop.core.feasibility import check, infeasible_values, is_plain, violations
from hotloop.core.records.training import TaskFacts
from hotloop.errors import DeviceError, InsufficientMemoryError, PlanError
from hotloop.plan import BASELINE, Plan
from tests.support.tuning.fake_machines import A_GPU, AN_OLD_GPU, GIB, LBFGS, a_device, a_machine, facts

CPU, CPU_BF16 = a_machine(), a_machine(cpu=a_device(precisions=("fp32", "bf16", "fp16", "fp64")))
GPU, OLD_GPU, NO_COMPILER = a_machine(A_GPU), a_machine(AN_OLD_GPU), a_machine(A_GPU, compiler=None)
MAC = a_machine(a_device("mps", ("fp32", "fp16")))
ON_GPU: dict[str, Any] = {"device": "cuda:0"}
RANKS: dict[str, Any] = {"parallel": "data"}
STAGES = {"parallel": "stages"}
GRAPHS = {**ON_GPU, "graphs": "step"}
TIMED, CONVOLVES = {"cudnn": "benchmark"}, {"has_convolution_layers": True}
APART = {"placement": "decoder=cpu,encoder=cuda:0"}

REFUSED = {
    "a device that isn't there": (CPU, {}, {"device": "cuda:0"}, ("this machine has cpu", "--device cpu")),
    "another number of it": (GPU, {}, {"device": "cuda:1"}, ("this machine has cpu, cuda:0",)),
    "tf32 on a CPU": (CPU, {}, {"precision": "tf32"}, ("no tf32", "Ampere", "precision=fp32")),
    "tf32 on an old GPU": (OLD_GPU, {}, {**ON_GPU, "precision": "tf32"}, ("cuda:0 has no tf32", "precision=fp32")),
    "bf16 without instructions": (CPU, {}, {"precision": "bf16"}, ("avx512_bf16", "precision=fp32")),
    "bf16 on an old GPU": (OLD_GPU, {}, {**ON_GPU, "precision": "bf16"}, ("cuda:0 has no bf16",)),
    "fp16 on a CPU": (CPU, {}, {"precision": "fp16"}, ("no loss scaling", "precision=fp32")),
    "fp16 on a CPU that has it": (CPU_BF16, {}, {"precision": "fp16"}, ("no loss scaling",)),
    "channels_last": (CPU, {"images": False}, {"layout": "channels_last"}, ("4 or 5 dimensions", "contiguous")),
    "a stream in memory": (CPU, {"data": "Stream"}, {"residency": "host"}, ("order of its own", "residency=stream")),
    "a stream on the device": (GPU, {"data": "Stream"}, {**ON_GPU, "residency": "device"}, ("order of its own",)),
    "data larger than the device": (
        GPU, {"data_bytes": 9 * GIB}, {**ON_GPU, "residency": "device"},
        ("9 GiB", "8 GiB free", "residency=host"),
    ),
    "no compiler": (NO_COMPILER, {}, {"compile": "forward"}, ("C++ compiler", "apt-get install g++", "compile=none")),
    "LBFGS compiled": (CPU, LBFGS, {"compile": "step"}, ("LBFGS calls the loss itself", "compile=none")),
    "LBFGS in a package": (CPU, LBFGS, {"compile": "package"}, ("LBFGS calls the loss itself",)),
    "a package elsewhere": (GPU, {}, {**ON_GPU, "compile": "package"}, ("made for the CPU", "compile=step")),
    "fp16 in one program": (
        GPU, {}, {**ON_GPU, "compile": "step", "precision": "fp16"}, ("outside of the compiled step", "compile=forward"),
    ),
    "an eager step rewritten": (CPU, {}, {"rewrites": "all"}, ("captured step", "compile=step", "rewrites=none")),
    "rewritten elsewhere": (MAC, {}, {"device": "mps", "rewrites": "all"}, ("measured on CPUs and CUDA devices alone",)),
    "oneDNN on a GPU": (GPU, {}, {**ON_GPU, "rewrites": "mm_by_onednn"}, ("is for the CPU",)),
    "a GPU's sums on a CPU": (CPU, {}, {"rewrites": "mm_as_sum"}, ("is for CUDA devices",)),
    "no convolution to pool": (CPU, {"convolutions": False}, {"rewrites": "conv_in_pool"}, ("no convolution",)),
    "words for the draws of pieces": (
        CPU, {}, {"rewrites": "draw_by_words", "accumulation": 2}, ("whole batches", "accumulation=1"),
    ),
    "memory that nobody can keep": (CPU, {}, {"allocator": "keep"}, ("only glibc", "allocator=default")),
    "cuDNN on a CPU": (CPU, CONVOLVES, TIMED, ("cuDNN is for CUDA devices", "cudnn=default")),
    "cuDNN on a Mac": (MAC, CONVOLVES, {"device": "mps", **TIMED}, ("not for mps", "cudnn=default")),
    "cuDNN without a convolution": (GPU, {}, {**ON_GPU, **TIMED}, ("the model has no convolution", "cudnn=default")),
    "graphs on a CPU": (CPU, {}, {"graphs": "step"}, ("graphs are for CUDA devices", "graphs=none")),
    "graphs on a Mac": (MAC, {}, {"device": "mps", "graphs": "step"}, ("not for mps",)),
    "several steps in one replay": (GPU, {}, {**ON_GPU, "graphs": 8}, ("the data must be stored there", "residency=device")),
    "LBFGS in a graph": (GPU, LBFGS, GRAPHS, ("LBFGS calls the loss itself", "graphs=none")),
    "a graph of a part": (GPU, {}, {**GRAPHS, "compile": "forward"}, ("the whole step", "compile=step")),
    "a graph of a package": (GPU, {}, {**GRAPHS, "compile": "package"}, ("a package is for the CPU", "compile=step")),
    "a graph in fp16": (GPU, {}, {**GRAPHS, "precision": "fp16"}, ("the host decides", "precision=bf16")),
    "no such implementation": (
        CPU, {"optimizer": "RMSprop", "implementations": ["forloop", "foreach"]}, {"optimizer": "fused"},
        ("RMSprop has no such implementation", "default, forloop, foreach"),
    ),
    "no implementation at all": (CPU, LBFGS, {"optimizer": "foreach"}, ("LBFGS has no such", "optimizer=default")),
    "ranks without a way to share": (CPU, {}, {"ranks": 2}, ("how the ranks share", "parallel=data")),
    "towers in fp16": (GPU, {}, {**ON_GPU, "parallel": "towers", "precision": "fp16"}, ("overflow", "precision=bf16")),
    "towers with LBFGS": (CPU, LBFGS, {"parallel": "towers"}, ("LBFGS calls the loss itself", "another optimizer")),
    "towers that compile": (CPU, {}, {"parallel": "towers", "compile": "step"}, ("untested", "compile=none")),
    "lists of both kinds": (CPU, {}, {"parallel": "tensor", "optimizer": "foreach"}, ("contain both", "optimizer=default")),
    "averages with LBFGS": (CPU, LBFGS, {"parallel": "local"}, ("LBFGS calls the loss itself", "parallel=data")),
    "averages of ranks in step": (CPU, {}, {**RANKS, "sync_every": 4}, ("average their weights", "parallel=local")),
    "averages of one process": (CPU, {}, {"sync_every": 2}, ("average their weights", "leave sync_every out")),
    "staleness of ranks in step": (CPU, {}, {**RANKS, "staleness": 3}, ("parallel=async", "leave staleness out")),
    "ranks that compile": (CPU, {}, {**RANKS, "compile": "step"}, ("on several ranks are untested", "compile=none")),
    "ranks of a package": (CPU, {}, {**RANKS, "compile": "package"}, ("on several ranks are untested", "parallel=none")),
    "ranks that record": (GPU, {}, {**GRAPHS, **RANKS}, ("untested", "graphs=none")),
    "ranks in pieces": (CPU, {}, {**RANKS, "accumulation": 2}, ("cut each batch into parts already", "accumulation=1")),
    "ranks of a stream": (CPU, {"data": "Stream"}, RANKS, ("may differ between ranks", "parallel=none")),
    "more ranks than samples": (CPU, {}, {"parallel": "data", "ranks": 65}, ("batch of 64", "ranks=64")),
    "more microbatches than samples": (CPU, {}, {**STAGES, "microbatches": 65}, ("batch of 64", "microbatches=64")),
    "a single stage": (CPU, {}, {**STAGES, "ranks": 1}, ("the whole model", "--ranks 2, or parallel=none")),
    "stages with channels last": (CPU, {}, {**STAGES, "layout": "channels_last"}, ("exported graph", "contiguous")),
    "stages of a closure": (CPU, {"closure": True}, STAGES, ("calls the loss itself", "parallel=data")),
    "a pipeline of nothing": (CPU, {}, {"pipeline": "gpipe"}, ("only parallel=stages", "leave pipeline out")),
    "ranks on a Mac": (MAC, {}, {"device": "mps", **RANKS}, ("gloo or NCCL", "--device cpu")),
    "modules apart, compiled": (GPU, {}, {**APART, "compile": "step"}, ("runs on one device", "compile=none")),
    "modules apart in a graph": (GPU, {}, {**GRAPHS, **APART}, ("runs on one device", "placement=none")),
    "modules apart on ranks": (GPU, {}, {**APART, **RANKS}, ("a rank has one device", "parallel=none")),
    "modules apart with workers": (GPU, {}, {**APART, "parallel": "async"}, ("one device", "placement=none")),
    "a module where nothing is": (GPU, {}, {"placement": "head=cuda:1"}, ("no cuda:1 for 'head'", "has cpu, cuda:0")),
    "kinds of devices in bf16": (
        GPU, {}, {**ON_GPU, **APART, "precision": "bf16"}, ("the same on cpu and cuda", "precision=fp32"),
    ),
    "modules apart with LBFGS": (GPU, LBFGS, APART, ("LBFGS", "one device", "another optimizer")),
    "more pieces than samples": (CPU, {}, {"accumulation": 65}, ("batch of 64", "65 pieces", "accumulation=64")),
    "LBFGS in pieces": (CPU, LBFGS, {"accumulation": 2}, ("LBFGS calls the loss itself", "accumulation=1")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_cannot_be_run_is_refused_in_one_line(name: str) -> None:
    machine, task, axes, says = REFUSED[name]
    assert any(all(words in f"{one.reason} {one.fix}" for words in says) for one in violations(*case(name)))
    with pytest.raises(PlanError) as error:
        check(Plan(**axes), facts(**task), machine)
    line = str(error.value)
    assert "\n" not in line
    for axis, value in axes.items():
        if axis != "device":
            assert f"{axis}={value}" in line


def case(name: str) -> tuple[Plan, TaskFacts, Any]:
    machine, task, axes, _ = REFUSED[name]
    return Plan(**axes), facts(**task), machine


RUNS = {
    "the baseline": (CPU, {}, {}),
    "a device without its number": (GPU, {}, {"device": "cuda"}),
    "tf32 on a new GPU": (GPU, {}, {**ON_GPU, "precision": "tf32"}),
    "bf16 with instructions": (CPU_BF16, {}, {"precision": "bf16"}),
    "fp16 on an old GPU": (OLD_GPU, {}, {**ON_GPU, "precision": "fp16"}),
    "channels_last of images": (CPU, {}, {"layout": "channels_last"}),
    "a stream as it comes": (CPU, {"data": "Stream"}, {"residency": "stream"}),
    "samples in memory": (CPU, {"data": "Samples", "data_bytes": None}, {"residency": "host"}),
    "data that just fits": (GPU, {"data_bytes": 8 * GIB}, {**ON_GPU, "residency": "device"}),
    "data larger than the memory, on the CPU": (CPU, {"data_bytes": 9 * GIB}, {"residency": "device"}),
    "compiled for a GPU without a C++ compiler": (NO_COMPILER, {}, {**ON_GPU, "compile": "step"}),
    "compiled for the CPU with one": (CPU, {}, {"compile": "package"}),
    "a stream compiled": (CPU, {"data": "Stream"}, {"compile": "step"}),
    "a compiled step rewritten": (CPU, {}, {"compile": "package", "rewrites": "all"}),
    "a graph": (GPU, {}, GRAPHS),
    "a graph of a compiled step, in pieces": (GPU, {}, {**GRAPHS, "compile": "step", "accumulation": 2}),
    "several steps in one replay, of data that lies there": (GPU, {}, {**ON_GPU, "graphs": 8, "residency": "device"}),
    "memory kept": (a_machine(allocator="glibc"), {}, {"allocator": "keep"}),
    "the host's memory kept beside a GPU": (a_machine(A_GPU, allocator="glibc"), {}, {**ON_GPU, "allocator": "keep"}),
    "cuDNN's timing": (GPU, CONVOLVES, {**ON_GPU, **TIMED}),
    "cuDNN's timing, compiled and recorded": (
        GPU,
        CONVOLVES,
        {**GRAPHS, **TIMED, "compile": "step", "layout": "channels_last", "optimizer": "fused"},
    ),
    "pieces compiled": (CPU, {}, {"compile": "step", "accumulation": 2}),
    "fp16 with its update apart": (GPU, {}, {**ON_GPU, "compile": "forward", "precision": "fp16"}),
    "an implementation that's there": (CPU, {}, {"optimizer": "fused"}),
    "modules apart": (GPU, {}, {**APART, "accumulation": 2, "layout": "channels_last", "residency": "host"}),
    "modules on a device without its number": (GPU, {}, {"placement": "head=cuda"}),
    "modules on one kind of devices in bf16": (GPU, {}, {**ON_GPU, "placement": "head=cuda:0", "precision": "bf16"}),
    "ranks": (CPU, {}, RANKS),
    "ranks with little to share, in shards": (GPU, {}, {**ON_GPU, "parallel": "sharded", "ranks": 64}),
    "one rank": (CPU, {}, {"ranks": 1}),
    "a piece per sample": (CPU, {}, {"accumulation": 64}),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_case_beside_it_passes(name: str) -> None:
    machine, task, axes = RUNS[name]
    assert violations(Plan(**axes), facts(**task), machine) == []
    check(Plan(**axes), facts(**task), machine)


@pytest.mark.parametrize(
    ("system", "remedy"), [("Linux 6", "apt-get"), ("Darwin 24", "xcode-select"), ("Windows 11", "Build Tools")]
)
def test_the_remedy_is_for_the_system_at_hand(system: str, remedy: str) -> None:
    found = violations(Plan(compile="step"), facts(), replace(NO_COMPILER, system=system))
    assert remedy in found[0].fix


def test_a_missing_device_is_all_that_is_said() -> None:
    with pytest.raises(DeviceError) as error:
        check(Plan(device="xpu:0", precision="bf16", graphs="step"), facts(), CPU)
    assert "device=xpu:0" in str(error.value) and "precision" not in str(error.value)


def test_several_reasons_stand_in_one_line_each_remedy_once() -> None:
    with pytest.raises(PlanError) as error:
        check(Plan(graphs="step", compile="step", accumulation=100), facts(**LBFGS), CPU)
    reasons, _, remedies = str(error.value).partition(". ")
    assert reasons.index("compile=step can't") < reasons.index("graphs=step with device=cpu can't")
    assert remedies.count("compile=none") == 1 and remedies.count("graphs=none") == 1
    assert "\n" not in reasons + remedies
    assert reasons.count("can't be run here") == 3  # of five


def test_the_table_names_every_value_that_cannot_be_run_and_no_other() -> None:
    assert {
        (one.axis, one.value) for one in infeasible_values(BASELINE, facts(**LBFGS, images=False), NO_COMPILER)
    } == {
        *(("device", "mps"), ("device", "xpu")),
        *(("precision", "tf32"), ("precision", "bf16"), ("precision", "fp16")),
        ("layout", "channels_last"),
        *(("compile", "forward"), ("compile", "step"), ("compile", "package")),
        *(("optimizer", "forloop"), ("optimizer", "foreach"), ("optimizer", "fused")),
        *(("rewrites", "all"), ("graphs", "step"), ("graphs", 8), ("accumulation", 2), ("allocator", "keep")),
        ("cudnn", "benchmark"),
    }


def test_the_table_goes_by_what_is_set() -> None:
    half = {(one.axis, one.value) for one in infeasible_values(Plan(**ON_GPU, precision="fp16"), facts(), GPU)}
    assert {("compile", "step"), ("compile", "package")} <= half
    assert ("compile", "forward") not in half
    assert not {axis for axis, _ in half} & {"optimizer", "residency", "layout"}


@pytest.mark.parametrize("axis", Plan.model_fields)
def test_a_plain_plan_differs_only_in_where_it_runs(axis: str) -> None:
    other = {"device": "cuda:0", "precision": "bf16", "layout": "channels_last", "residency": "host",
             "compile": "step", "rewrites": "all", "graphs": 2, "optimizer": "fused", "accumulation": 2, "workers": 1,
             "threads": 1, "parallel": "data", "ranks": 2, "sync_every": 2, "staleness": 1, "workforce": "ray",
             "pipeline": "gpipe", "microbatches": 2, "split": "1", "placement": "1=cpu", "allocator": "keep", "cudnn": "benchmark"}  # fmt: skip
    assert is_plain(BASELINE)
    assert is_plain(BASELINE.with_axes(**{axis: other[axis]})) is (axis in ("device", "workers", "threads"))


def test_every_plain_plan_can_be_run_wherever_its_device_is() -> None:
    odd = facts(**LBFGS, images=False, data="Stream", data_bytes=None, samples=None, batches=None, steps=None)
    for machine in (CPU, GPU, OLD_GPU, NO_COMPILER, MAC):
        for device in machine.devices:
            assert violations(Plan(device=device.name, workers=2, threads=3), odd, machine) == []


def test_data_without_room_on_the_device_may_have_it_another_time() -> None:
    """So that nobody remembers it as a failure of the plan; with another reason it is one."""
    wanted, large = Plan(device="cuda:0", residency="device"), facts(data_bytes=10**15)
    with pytest.raises(InsufficientMemoryError, match="free"):
        check(wanted, large, GPU)
    with pytest.raises(PlanError) as raised:
        check(wanted.with_axes(compile="package"), large, GPU)
    assert not isinstance(raised.value, InsufficientMemoryError)
