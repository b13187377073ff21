"""Two plans in turns: the order of windows, what counts, and who goes on."""

from __future__ import annotations

import pytest

from hotloop.plan import Plan
from hotloop.tuning.window_race import WARM_UP_STEPS, WINDOW_S, WindowRace

OWN, RIVAL = Plan(), Plan(optimizer="fused")


def run(race: WindowRace, own_s: float, rival_s: float, most: int = 10_000) -> list[Plan]:
    """Trains by the race to its end in spans of ten steps; returns the plan of each span."""
    plans = []
    while not race.is_over and len(plans) < most:
        plan = race.next_plan
        steps = race.most_steps(10)
        race.record(steps, steps * (rival_s if plan == RIVAL else own_s))
        plans.append(plan)
    return plans


@pytest.mark.parametrize(("own_s", "rival_s", "winner"), [(2e-3, 1e-3, RIVAL), (1e-3, 2e-3, OWN), (1e-3, 1e-3, OWN)])
def test_the_faster_plan_goes_on(own_s: float, rival_s: float, winner: Plan) -> None:
    race = WindowRace(OWN, RIVAL)
    run(race, own_s, rival_s)
    assert race.is_over and race.winner == winner
    assert race.ratio is not None and race.ratio.median == pytest.approx(own_s / rival_s)
    assert race.step_s(RIVAL) == pytest.approx(rival_s) and race.step_s(OWN) == pytest.approx(own_s)


def test_a_small_gain_needs_eight_pairs_and_a_large_one_three() -> None:
    for rival_s, pairs in ((0.9e-3, 8), (0.5e-3, 3)):
        race = WindowRace(OWN, RIVAL)
        run(race, 1e-3, rival_s)
        assert race.ratio is not None and race.ratio.pairs == pairs


def test_windows_alternate_as_a_b_b_a() -> None:
    plans = run(WindowRace(OWN, RIVAL), 1.0, 1.0, most=60)
    turns = [plan for number, plan in enumerate(plans) if number == 0 or plan != plans[number - 1]]
    assert turns[:4] == [OWN, RIVAL, OWN, RIVAL]
    spans = [plans.index(RIVAL), plans.index(OWN, plans.index(RIVAL)) - plans.index(RIVAL)]
    assert spans == [2, 3]  # a warm-up and one window; a warm-up and two


def test_the_first_steps_of_a_plan_do_not_count() -> None:
    race = WindowRace(OWN, RIVAL)
    for _ in range(200):
        if race.is_over:
            break
        steps = race.most_steps(10)
        is_warm_up = steps == WARM_UP_STEPS
        race.record(steps, steps * (100.0 if is_warm_up else WINDOW_S))
    assert race.ratio is not None and race.ratio.median == pytest.approx(1.0)


def test_an_unfinished_race_changes_nothing() -> None:
    race = WindowRace(OWN, RIVAL)
    assert race.winner == OWN and race.ratio is None and not race.is_over
    run(race, 2e-3, 1e-3, most=6)
    assert race.winner == OWN
