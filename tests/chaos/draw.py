"""What goes wrong in a run, and when? All of it follows from a seed."""

from __future__ import annotations

import random
from collections import Counter

from tests.chaos.kinds import ALL, THEMES
from tests.chaos.schedule import Fault, Setting

__all__ = ["schedule_of", "setting_of"]

_MEAN_PAUSE_SECONDS = 0.45


def setting_of(
    seed: int, policy: str | None = None, volumes: str | None = None, themes: tuple[str, ...] | None = None
) -> Setting:
    """What is not given follows from the seed: seeds go through the themes, and some have a second one."""
    chooser = random.Random(f"setting {seed}")
    drawn_policy, drawn_volumes = (
        chooser.choice(("drain", "planned", "redox", "exact")),
        chooser.choice(("kept", "kept", "none", "mixed")),
    )
    first, second, two = list(THEMES)[seed % len(THEMES)], chooser.choice(list(THEMES)), chooser.random() < 0.6
    if themes is None:
        themes = tuple(sorted({first, second} if two else {first}))
    if "journals" in themes and drawn_volumes == "none":
        drawn_volumes = "mixed"
    order = chooser.choice(("keyed", "keyed", "keyed", "explicit"))
    of_planned = random.Random(f"planned {seed}")
    drop_last, has_home = of_planned.random() < 0.3, of_planned.random() < 0.5
    names_memory = of_planned.random() < 0.4
    of_ranks = of_planned.choice(("keyed", "keyed", "explicit"))
    is_planned = (policy or drawn_policy) == "planned"
    return Setting(
        seed=seed,
        policy=policy or drawn_policy,
        volumes=volumes or drawn_volumes,
        themes=themes,
        pods=max(chooser.choice((1, 2, 2, 2, 3, 3, 3)), 3 * ("scaling" in themes), 2 * ("zombies" in themes)),
        ranks=chooser.choice((2, 3)),
        workers=chooser.choice((1, 2)),
        epochs=chooser.choice((3, 3, 5)),
        chunk_size=chooser.choice((8, 16)),
        order="keyed" if "resumes" in themes else of_ranks if is_planned else order,
        pinned_fraction=chooser.choice((0.0, 0.0, 0.1)),
        unix_socket=chooser.random() < 0.25 and "zombies" not in themes,  # it is the machine's, which is another one
        drop_last=drop_last and is_planned,
        names_memory=names_memory or not is_planned,
        # Of a pod that was replaced, ranks know where it was; behind a relay it is where it was.
        has_home=has_home or not is_planned or "zombies" in themes,
    )


def schedule_of(setting: Setting, seconds: float) -> list[Fault]:
    """Faults that begin within so many seconds, in the order of their beginnings."""
    chooser = random.Random(f"schedule {setting.seed} {setting.policy} {setting.volumes} {setting.themes}")
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
