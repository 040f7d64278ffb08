"""Options, parts and state: one line each; a wrong value is refused by name."""

import inspect
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest

from fedntk.ntk import options
from fedntk.ntk.options import Declared, argument, option, part, saved_state, state

from ..conftest import refused


class Toy(Declared):
    """A toy."""

    rate: float | Literal["auto"] = option("the rate", default=0.5, above=0, to_clients=True)
    count: int = option("how many", default=2, at_least=1, at_most=9)
    steps: Sequence[float] = option("the grid", default=(1.0, 2.0), at_least=0, to_clients=True)
    kind: Literal["big", "small"] = option("which", default="big", to_clients=True)
    model: object = argument("anything", default=None)
    seen: dict[int, int] = state(dict)
    open: list[int] = state(list, saved=False)

    def check(self) -> None:
        if self.kind == "small" and self.count > 5:
            raise ValueError(f"count: expected at most 5 with kind='small', got {self.count}")


class Larger(Toy):
    """A toy with another default and another option."""

    count: int = option("how many", default=3, at_least=1)
    extra: bool = option("one line more", default=False, compared=False)


class Mean(Declared):
    """A mean with state."""

    decay: float = option("the decay", default=0.5, at_least=0, below=1)
    toy: Toy = part("how it plays", default=Toy(kind="small"))
    number: int = state(int)


class Outer(Declared):
    """What has parts."""

    rate: float = option("the rate", default=0.5)
    toy: Toy = part("how it plays", default=Toy)
    mean: Mean | None = part("a mean over rounds", default=None)
    rounds: int = state(int)

    def check(self) -> None:
        if self.mean is not None and self.toy.kind == "small":
            raise ValueError("mean: expected None with a small toy")


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Toy, {"rate": 0}, r"rate: expected more than 0, got 0\.0"),
        (Toy, {"rate": "fast"}, "rate: expected float or 'auto', got 'fast'"),
        (Toy, {"rate": math.nan}, "rate: expected a finite number, got nan"),
        (Toy, {"rate": math.inf}, "rate: expected a finite number, got inf"),
        (Toy, {"count": 10}, "count: expected at most 9, got 10"),
        (Toy, {"count": True}, "count: expected int, got bool True"),
        (Toy, {"steps": "1,2"}, "steps: expected a sequence of float, got '1,2'"),
        (Toy, {"steps": [1, -1]}, r"steps: expected at least 0, got -1\.0"),
        (Toy, {"kind": "bog"}, "kind: expected one of big, small, got 'bog'; did you mean 'big'"),
        (Toy, {"kind": "small", "count": 6}, "count: expected at most 5 with kind='small', got 6"),
        (Outer, {"toy": "big"}, r"^toy: expected Toy, got str 'big'; write toy=Toy\(\.\.\.\)$"),
        (Outer, {"toy": None}, "^toy: expected Toy, got NoneType None; write toy"),
        (Outer, {"toy": True}, "^toy: expected Toy, got bool True; write toy"),
        (Outer, {"toy": Toy}, r"^toy: expected Toy, got the class Toy; write toy=Toy\(\.\.\.\)$"),
        (Outer, {"toy": Mean()}, r"^toy: expected Toy, got Mean Mean\(\); write toy"),
        (Outer, {"mean": 0.5}, "^mean: expected Mean or None, got float 0.5; write mean=Mean"),
        (Outer, {"mean": True, "toy": Toy(kind="small")}, "^mean: expected None with a small toy"),
    ],
)
def test_a_wrong_value_is_refused_by_name(kind, values, message):
    refused(message, kind, **values)


def test_values_of_parts_and_rules_across_them_are_refused_by_name():
    make = options.parts_of(Outer)["toy"].make
    refused(r"^toy\.kind: expected one of big, small, got 'bog'; ", make, {"kind": "bog"})
    refused(r"^toy\.count: expected at most 5 with", make, {"kind": "small", "count": 6})
    check = options.check_together  # needs no object
    check(Outer, {"toy": Toy(kind="small")})
    refused("count: expected at most 5", check, Toy, {"kind": "small", "count": 9})
    refused("mean: expected None", check, Outer, {"toy": Toy(kind="small"), "mean": 1})


def test_values_are_converted_to_their_types():
    toy = Toy(rate=np.float32(2), count=np.int64(3), steps=range(3), model=object())
    assert (toy.rate, toy.count, toy.steps) == (2.0, 3, (0.0, 1.0, 2.0))
    assert [type(value) for value in (toy.rate, toy.count)] == [float, int]


def test_an_object_has_copies_of_its_parts_with_their_first_state():
    mean = Mean(toy=Toy(count=4))
    mean.toy.seen[1] = 2
    one, two = Outer(mean=mean), Outer(mean=mean)
    assert (one.mean.toy.seen, one.mean.toy.count) == ({}, 4)
    one.mean.toy.seen[3] = 4
    assert (two.mean.toy.seen, mean.toy.seen) == ({}, {1: 2})
    assert one.part_of(Mean) is one.mean
    assert Outer().toy is not Outer().toy
    assert Outer().part_of(Mean) is Outer(mean=False).mean is None
    assert Outer(mean=True).mean.decay == 0.5


def test_compared_options_have_those_of_the_parts():
    toy = {"rate": 0.5, "count": 2, "steps": [1.0, 2.0], "kind": "big"}
    assert Larger(count=12).compared_options() == {**toy, "count": 12}
    assert Outer().compared_options() == {"rate": 0.5, "toy": toy, "mean": None}
    mean = {"decay": 0.5, "toy": {**toy, "kind": "small"}}
    assert Outer(mean=Mean()).compared_options()["mean"] == mean
    assert Outer(toy=Larger(count=2)).compared_options()["toy"] == {**toy, "class": "Larger"}


def test_options_travel_and_are_checked_when_they_arrive():
    config = Toy(rate="auto", steps=[3]).to_config()
    assert config == {"option-rate": "auto", "option-steps": [3.0], "option-kind": "big"}
    toy = Toy.from_config({**config, "server-round": 1})
    assert (toy.rate, toy.steps, toy.count) == ("auto", (3.0,), 2)
    with pytest.raises(ValueError, match=r"expected option-kind, got \['option-rate'"):
        Toy.from_config({k: v for k, v in config.items() if k != "option-kind"})
    refused("kind: expected one of big, small", Toy.from_config, {**config, "option-kind": 1})


def test_state_is_no_argument_has_dotted_names_in_parts_and_is_reset():
    assert not {"seen", "open"} & inspect.signature(Toy).parameters.keys()
    outer = Outer(mean=Mean())
    values = {"rounds": 1, "toy.seen": {2: 3}, "mean.number": 4, "mean.toy.seen": {5: 6}}
    assert saved_state(outer).keys() == values.keys()
    assert list(saved_state(Outer())) == ["rounds", "toy.seen"]
    for name, (holder, field, _) in saved_state(outer).items():
        setattr(holder, field, values[name])
    outer.toy.open.append(7)
    assert (outer.rounds, outer.toy.seen, outer.mean.toy.seen) == (1, {2: 3}, {5: 6})
    outer.reset_state(saved_too=False)
    assert (outer.rounds, outer.mean.number, outer.toy.open) == (1, 4, [])
    outer.reset_state()
    assert (outer.rounds, outer.mean.number, outer.mean.toy.seen) == (0, 0, {})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("rate", "0.25", 0.25), ("rate", "auto", "auto"), ("count", "4", 4), ("extra", "true", True),
     ("steps", "1,2.5", (1.0, 2.5)), ("kind", "small", "small")],
)  # fmt: skip
def test_text_is_read_as_the_options_type(name, text, value):
    declared = Larger.options()[name]
    assert declared.from_text(text) == value
    assert declared.from_text(str(declared.plain(value))) == value
    refused("mine: expected int, got 'x'", Toy.options()["count"].from_text, "x", "mine")


def test_signature_docstring_and_repr_show_options_and_parts():
    assert list(inspect.signature(Larger).parameters) == [*Toy.options(), "extra"]
    assert "extra : bool, default False\n    One line more." in (Larger.__doc__ or "")
    assert Toy.options()["kind"].describe() == "kind = 'big' (big, small): which"
    shown = inspect.signature(Outer)
    assert list(shown.parameters) == list(options.parameters_of(Outer)) == ["rate", "toy", "mean"]
    assert "toy: tests.ntk.test_options.Toy = Toy()" in str(shown)
    text = Outer.__doc__ or ""
    assert "toy : Toy, default Toy()\n    How it plays." in text
    assert "mean : Mean or None, default None\n    A mean over rounds." in text
    assert "decay" not in text
    assert "toy : Toy, default Toy(kind='small')" in (Mean.__doc__ or "")
    outer = Outer(rate=1, mean=Mean(toy=Toy(count=3)))
    assert repr(Outer()) == "Outer()"
    assert repr(outer) == "Outer(rate=1.0, mean=Mean(toy=Toy(count=3)))"


def test_the_type_of_a_part_is_one_declared_class():
    for kind in (int, Toy | Mean, Toy | int):
        with pytest.raises(TypeError, match=r"Wrong\.toy: expected a class derived from Declared"):
            type("Wrong", (Declared,), {"__annotations__": {"toy": kind}, "toy": part("one")})
