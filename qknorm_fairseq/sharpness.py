"""How sharp the attention of each model is, beside its baseline's: means over finished seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from qknorm_fairseq.summary import Group

Modules = Mapping[str, Mapping[str, float]]  # of attention_statistics.of_run
Attention = Mapping[str, Sequence[Modules]]  # model: of each finished seed
VALUES = ("entropy", "saturated")


@dataclass(frozen=True)
class Sharpness:
    """A model and its baseline, in the modules that both have.

    Attributes:
        modules, base_modules: for each module `entropy`, as a share of its maximum, and the share
            of rows that are `saturated`: from 0 to 1.
        mean, base_mean: of these, over the modules.
        fewer_saturated, higher_entropy: in how many modules the model has these.
    """

    model: str
    base: str
    modules: Modules
    base_modules: Modules
    mean: Mapping[str, float] = field(init=False)
    base_mean: Mapping[str, float] = field(init=False)
    fewer_saturated: int = field(init=False)
    higher_entropy: int = field(init=False)

    def __post_init__(self) -> None:
        both = [(own, self.base_modules[name]) for name, own in self.modules.items()]
        set_once = object.__setattr__
        for name, of in (("mean", self.modules), ("base_mean", self.base_modules)):
            set_once(self, name, {v: fmean(each[v] for each in of.values()) for v in VALUES})
        set_once(self, "fewer_saturated", sum(a["saturated"] < b["saturated"] for a, b in both))
        set_once(self, "higher_entropy", sum(a["entropy"] > b["entropy"] for a, b in both))


def of_group(group: Group, attention: Attention) -> list[Sharpness]:
    """Each model that has a baseline, where the statistics of both are known."""
    means = {model: _over_seeds(seeds) for model, seeds in attention.items()}
    found = []
    for row in group.rows:
        base = row.difference.base if row.difference else None
        if base in means and row.model in means:
            own, other = means[row.model], means[base]
            common = [name for name in own if name in other]
            if common:
                found.append(
                    Sharpness(
                        *(row.model, base),
                        *({name: of[name] for name in common} for of in (own, other)),
                    )
                )
    return found


def over_groups(groups: Mapping[str, Sequence[Sharpness]]) -> list[Sharpness]:
    """The same over all modules of all groups; of what is in at least two of them.

    Args:
        groups: by title, which the modules' names begin with in the result.
    """
    found: dict[tuple[str, str], dict[str, Sharpness]] = defaultdict(dict)
    for title, of in groups.items():
        for one in of:
            found[one.model, one.base][title] = one
    return [
        Sharpness(
            *(model, base),
            {f"{title}: {name}": v for title, s in of.items() for name, v in s.modules.items()},
            {
                f"{title}: {name}": v
                for title, s in of.items()
                for name, v in s.base_modules.items()
            },
        )
        for (model, base), of in found.items()
        if len(of) > 1
    ]


def _over_seeds(seeds: Sequence[Modules]) -> Modules:
    names = [name for name in seeds[0] if all(name in seed for seed in seeds)]
    return {
        name: {value: fmean(seed[name][value] for seed in seeds) for value in VALUES}
        for name in names
    }
