"""A Plan is a value: frozen, comparable, and the same after a trip through TOML."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.core.plan_request import PlanRequest
from hotloop.errors import REMOVED, HotloopError, PlanError
from hotloop.plan import BASELINE, Placement, Plan, Steps

# Text that TOML can hold: any but lone surrogates, which are no text in UTF-8.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def values_of(annotation: Any) -> st.SearchStrategy:
    """Values that an axis of this type takes."""
    if annotation is Placement:
        names = st.text("abc_019.", min_size=1, max_size=8)
        return st.dictionaries(names, st.sampled_from(["cpu", "cuda:0", "cuda:1", "mps"]), min_size=1)
    if annotation is Steps:
        return st.integers(2, 1000)
    if options := get_args(annotation):
        literal = not any(isinstance(option, type) or get_args(option) for option in options)
        return st.sampled_from(options) if literal else st.one_of(*map(values_of, options))
    return {
        str: TEXT,
        int: st.integers(1, 2**40),
        float: st.floats(0.1, 1e9),
        bool: st.booleans(),
        type(None): st.none(),
    }[annotation]


PLANS = st.fixed_dictionaries(
    {}, optional={name: values_of(field.annotation) for name, field in Plan.model_fields.items()}
).map(lambda axes: Plan(**axes))


@given(PLANS)
def test_toml_keeps_every_axis(plan: Plan) -> None:
    assert Plan.from_toml(plan.to_toml()) == Plan.from_toml(plan.to_toml(plan.relevant_axes())) == plan


@given(PLANS)
def test_toml_names_every_axis_so_that_another_default_later_changes_nothing(plan: Plan) -> None:
    assert tomllib.loads(plan.to_toml()) == {name: v for name, v in plan.model_dump().items() if v is not None}


@given(PLANS, PLANS)
def test_plans_are_equal_exactly_when_their_toml_is(one: Plan, other: Plan) -> None:
    assert (one == other) == (one.to_toml() == other.to_toml())
    assert len({one, other}) == (1 if one == other else 2)


@given(PLANS, st.integers(0, 64))
def test_changing_one_axis_leaves_the_others_and_the_original(plan: Plan, workers: int) -> None:
    before = plan.model_dump()
    changed = plan.with_axes(workers=workers)
    assert changed.model_dump() == before | {"workers": workers}
    assert changed.model_fields_set == plan.model_fields_set | {"workers"}
    assert plan.model_dump() == before


def test_it_is_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        BASELINE.device = "cuda"  # type: ignore[misc]


def test_the_baseline_is_eager_on_the_cpu_under_the_settings_of_torch() -> None:
    assert (BASELINE.compile, BASELINE.precision, BASELINE.device) == ("none", "default", "cpu")


@pytest.mark.parametrize("make", [Plan, BASELINE.with_axes], ids=["new", "changed"])
@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"precison": "fp32"}, ["unknown axis 'precison'", "precision", "Did you mean 'precision'?"]),
        ({"precision": "fp33"}, ["precision='fp33'", "'fp32'"]),
        (
            {"engine": "arrays"},
            ["engine='arrays' was removed from plans", "Leave engine out", "hotloop.arrays.Network"],
        ),
        ({"workers": -1}, ["workers=-1", "expected 0 or more"]),
        ({"workers": "many"}, ["workers='many'", "expected a whole number"]),
        ({"workers": 1.5}, ["workers=1.5", "expected a whole number"]),
        ({"threads": 0}, ["threads=0", "expected 1 or more"]),
        ({"device": 3}, ["device=3", "string"]),
        ({"graphs": 1}, ["graphs=1", "'none'", "'step'", "2 or more"]),
        ({"graphs": "many"}, ["graphs='many'", "'step'", "2 or more"]),
        ({"accumulation": 0}, ["accumulation=0", "1 or more"]),
        ({"compile": "all"}, ["compile='all'", "'none'", "'package'"]),
        ({"placement": "cuda:0"}, ["placement='cuda:0'", "such as encoder=cuda:0,head=cuda:1"]),
        ({"placement": "a=cpu,a=cuda"}, ["each once"]),
        ({"placement": {"a": 0}}, ["placement={'a': 0}", "each once"]),
        ({"placement": {"": "cpu"}}, ["modules"]),
        ({"placement": {"a": {}}}, ["modules"]),
        ({"placement": 3}, ["placement=3"]),
    ],
)
def test_what_no_plan_has_is_refused_with_what_is_allowed(make, axes: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        make(**axes)
    message = str(caught.value)
    assert [words for words in says if words not in message] == [], message
    assert "\n" not in message


@pytest.mark.parametrize("name", [name for name, field in Plan.model_fields.items() if get_args(field.annotation)])
def test_an_impossible_value_names_all_the_allowed_ones(name: str) -> None:
    kinds = get_args(Plan.model_fields[name].annotation)
    options = [option for kind in kinds for option in (kind, *get_args(kind)) if isinstance(option, str)]
    with pytest.raises(PlanError) as caught:
        Plan(**{name: "nothing of the sort"})
    assert all(repr(option) in str(caught.value) for option in options)


@pytest.mark.parametrize("removed", [name for name in REMOVED if not name.startswith(("hotloop ", "plan="))])
def test_a_removed_axis_or_value_says_what_to_use_instead(removed: str, tmp_path: Path) -> None:
    axis, _, value = removed.partition("=")
    (tmp_path / "plan.toml").write_text(f'threads = 0\n{axis} = "{value or "any"}"\n')
    for make in (lambda: Plan(**{axis: value or "any"}), lambda: PlanRequest.from_value(tmp_path / "plan.toml")):
        with pytest.raises(PlanError) as caught:
            make()
        message = str(caught.value)
        assert f"{axis}={value or 'any'!r} was removed" in message and "\n" not in message
        assert message.endswith(REMOVED[removed][1:])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("device = ", "is not TOML"),
        ("device = 'cpu'\ndevice = 'cuda'", "is not TOML"),
        ("[device]\nname = 'cpu'", "device={'name': 'cpu'}"),
        ("speed = 'high'", "unknown axis 'speed'"),
    ],
)
def test_text_that_is_no_plan(text: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(text)
    assert says in str(caught.value)


def test_a_placement_is_one_value_however_it_is_written() -> None:
    plan = Plan(placement={"head": "cuda:1", "body.blocks.3": "cuda:0"})
    assert plan.placement == {"body.blocks.3": "cuda:0", "head": "cuda:1"}
    assert plan.brief() == "placement=body.blocks.3=cuda:0,head=cuda:1"
    others = [
        Plan(placement=str(plan.placement)),
        Plan(placement=" head = cuda:1, body.blocks.3=cuda:0"),
        Plan(**plan.model_dump()),
        Plan.from_toml('[placement]\nbody.blocks.3 = "cuda:0"\nhead = "cuda:1"'),
        Plan.from_toml('placement = "head=cuda:1,body.blocks.3=cuda:0"'),
    ]
    assert {plan, *others} == {plan}
    assert Plan(placement={}) == Plan(placement=None) == BASELINE


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    plan = Plan(device="cuda:1", workers=4)
    path.write_text(plan.to_toml(), encoding="utf-8")
    assert Plan.read(path) == plan
    path.write_text("workers = 'x'")
    with pytest.raises(PlanError, match="workers='x'"):
        Plan.read(path)
    path.write_bytes(b"device = '\xff'")
    with pytest.raises(PlanError, match="is not TOML"):
        Plan.read(path)
    with pytest.raises(PlanError, match=r"no plan file at .*nowhere"):
        Plan.read(tmp_path / "nowhere")


OF_A_RUN = [
    Plan(parallel="stages", ranks=2, pipeline="gpipe", microbatches=8, split="2"),
    Plan(parallel="local", ranks=3, sync_every=4),
    Plan(parallel="async", ranks=4, staleness=3, workforce="ray"),
]


@pytest.mark.parametrize("plan", OF_A_RUN, ids=lambda plan: plan.parallel)
def test_what_is_said_of_one_way_of_sharing_goes_with_it(plan: Plan) -> None:
    """Not what is asked for by name, nor any other axis."""
    saved = plan.with_axes(device="cuda", precision="bf16")
    rest = {"device": "cuda", "precision": "bf16"}
    assert PlanRequest.from_value(saved, {"parallel": "none"}).plan == Plan(**rest)
    shared = {**rest, "parallel": "data", "workforce": plan.workforce}
    assert PlanRequest.from_value(saved, {"parallel": "data"}).plan == Plan(**shared, ranks=plan.ranks)
    assert PlanRequest.from_value(saved, {"parallel": plan.parallel}).plan == saved
    named = {"parallel": "data", "ranks": "5", "microbatches": "8"}
    assert PlanRequest.from_value(saved, named).plan == Plan(**shared, ranks=5, microbatches=8)


def test_its_errors_belong_to_the_one_tree() -> None:
    with pytest.raises(HotloopError):
        Plan(compile="steam")


def test_a_plan_needs_no_torch() -> None:
    code = "import sys; from hotloop import Plan; Plan(device='cuda').to_toml(); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("plan", "axes"),
    [
        (Plan(), {"device"}),
        (Plan(compile="step"), {"device", "compile", "rewrites"}),
        (Plan(parallel="data", ranks=2), {"device", "parallel", "ranks", "workforce"}),
        (
            Plan(parallel="stages"),
            {"device", "parallel", "ranks", "workforce", "pipeline", "microbatches", "split"},
        ),
    ],
)
def test_relevant_axes(plan: Plan, axes: set[str]) -> None:
    assert plan.relevant_axes() == axes
    assert plan.relevant_axes({"threads"}) == axes | {"threads"}
