"""What goes wrong in a run, and when? All of it follows from a seed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from tests.chaos.kinds import ALL, LIVE_THEMES, NAMED_THEMES, PLANNED_THEMES, THEMES
from tests.chaos.schedule import Fault, Setting

__all__ = ["POLICIES", "schedule_of", "setting_of"]

POLICIES = ("planned", "redox", "exact")
_MEAN_PAUSE_SECONDS = 0.45


def setting_of(seed: int, policy: str | None = None, themes: tuple[str, ...] | None = None) -> Setting:
    """What is not given follows from the seed: seeds go through the themes, and some have a second one. Most policies
    that are drawn are planned, and the theme ``lost`` is of the others."""
    chooser = random.Random(f"setting {seed}")
    policy = policy or chooser.choice(("planned", "planned", "planned", "planned", "redox", "exact"))
    is_planned = policy == "planned"
    others = (*NAMED_THEMES, *(LIVE_THEMES if is_planned else PLANNED_THEMES))
    of_policy = [theme for theme in THEMES if theme not in others]
    first, second, two = of_policy[seed % len(of_policy)], chooser.choice(of_policy), chooser.random() < 0.6
    if themes is None:
        themes = tuple(sorted({first, second} if two else {first}))
    setting = Setting(
        seed=seed,
        policy=policy,
        themes=themes,
        pods=max(chooser.choice((1, 2, 2, 2, 3, 3, 3)), 3 * ("scaling" in themes)),
        ranks=chooser.choice((2, 3)),
        workers=chooser.choice((1, 2)),
        epochs=chooser.choice((3, 3, 5)),
        chunk_size=chooser.choice((8, 16)),
        order="keyed"
        if {"resumes", "mixture", "sweep"} & {*themes}
        else chooser.choice(("keyed", "keyed", "explicit")),
        pinned_fraction=chooser.choice((0.0, 0.0, 0.1)),
        unix_socket=chooser.random() < 0.25,
        drop_last=chooser.random() < 0.3 and is_planned,
        names_memory=chooser.random() < 0.4 or not is_planned,
        has_home=chooser.random() < 0.5 or not is_planned,
    )
    return _swept(setting) if is_planned and "sweep" in themes else setting


def _swept(setting: Setting) -> Setting:
    chooser = random.Random(f"sweep {setting.seed}")
    return replace(
        setting,
        beside=chooser.choice((1, 2)),
        beside_pace=chooser.choice((1.0, 1.0, 3.0)),
        pinned_fraction=chooser.choice((0.0, 0.1, 0.4)),
        pinned_disk=chooser.random() < 0.5,
    )


def schedule_of(setting: Setting, seconds: float) -> list[Fault]:
    """Faults that begin within so many seconds, in the order of their beginnings."""
    chooser = random.Random(f"schedule {setting.seed} {setting.policy} {setting.themes}")
    drawn = Counter[str]()
    weights = {
        kind.name: kind.weight(setting) for kind in ALL.values() if not kind.theme or kind.theme in setting.themes
    }
    faults, at = [], 0.0
    while (at := at + chooser.expovariate(1 / _MEAN_PAUSE_SECONDS)) < seconds:
        left = [name for name in weights if drawn[name] < ALL[name].most]
        name = chooser.choices(left, [weights[name] for name in left])[0]
        drawn[name] += 1
        target = ALL[name].target(setting, chooser)
        faults.append(Fault(round(at, 2), name, target, round(chooser.uniform(*ALL[name].lasts), 2)))
    return faults
