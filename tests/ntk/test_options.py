"""Options and state: one line each; a wrong value is refused by name."""

import inspect
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest

from fedntk.ntk.options import Declared, argument, option, state

from ..conftest import refused


class Toy(Declared):
    """A toy."""

    rate: float | Literal["auto"] = option("the rate", default=0.5, above=0, to_clients=True)
    count: int = option("how many", default=2, at_least=1, at_most=9)
    steps: Sequence[float] = option("the grid", default=(1.0, 2.0), at_least=0, to_clients=True)
    kind: Literal["big", "small"] = option("which", default="big", to_clients=True)
    given: object = argument("anything", default=None)
    kept: dict[int, int] = state(dict)
    passing: list[int] = state(list, saved=False)

    def check(self) -> None:
        super().check()
        if self.kind == "small" and self.count > 5:
            raise ValueError(f"count: expected at most 5 with kind='small', got {self.count}")


class Larger(Toy):
    count: int = option("how many", default=3, at_least=1)
    extra: bool = option("one line more", default=False, compared=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 0}, r"rate: expected more than 0, got 0\.0"),
        ({"rate": "fast"}, "rate: expected float or 'auto', got 'fast'"),
        ({"rate": math.nan}, "rate: expected a finite number, got nan"),
        ({"rate": math.inf}, "rate: expected a finite number, got inf"),
        ({"count": 10}, "count: expected at most 9, got 10"),
        ({"count": True}, "count: expected int, got bool True"),
        ({"steps": "1,2"}, "steps: expected a sequence of float, got '1,2'"),
        ({"steps": [1, -1]}, r"steps: expected at least 0, got -1\.0"),
        ({"kind": "bog"}, "kind: expected one of big, small, got 'bog'; did you mean 'big'"),
        ({"kind": "small", "count": 6}, "count: expected at most 5 with kind='small', got 6"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values, message):
    refused(message, Toy, **values)


def test_values_are_converted_to_their_types():
    toy = Toy(rate=np.float32(2), count=np.int64(3), steps=range(3), given=object())
    assert (toy.rate, toy.count, toy.steps) == (2.0, 3, (0.0, 1.0, 2.0))
    assert [type(value) for value in (toy.rate, toy.count)] == [float, int]


def test_an_option_is_one_line_and_stands_wherever_options_do():
    assert list(inspect.signature(Larger).parameters) == [*Toy.options(), "extra"]
    assert Larger().count == 3
    compared = {"rate": 0.5, "count": 12, "steps": [1.0, 2.0], "kind": "big"}
    assert Larger(count=12).compared_options() == compared
    assert "extra : bool, default False\n    One line more." in (Larger.__doc__ or "")
    assert Toy.options()["kind"].describe() == "kind = 'big' (big, small): which"


def test_options_travel_and_are_checked_when_they_arrive():
    config = Toy(rate="auto", steps=[3]).to_config()
    assert config == {"option-rate": "auto", "option-steps": [3.0], "option-kind": "big"}
    there = Toy.from_config({**config, "server-round": 1})
    assert (there.rate, there.steps, there.count) == ("auto", (3.0,), 2)
    with pytest.raises(ValueError, match=r"expected option-kind, got \['option-rate'"):
        Toy.from_config({k: v for k, v in config.items() if k != "option-kind"})
    refused("kind: expected one of big, small", Toy.from_config, {**config, "option-kind": 1})


def test_rules_across_options_need_no_object():
    Toy.check_together({"kind": "small"})
    refused("count: expected at most 5", Toy.check_together, {"kind": "small", "count": 9})


def test_state_is_no_argument_and_is_reset():
    assert not {"kept", "passing"} & inspect.signature(Toy).parameters.keys()
    toy = Toy()
    assert list(toy.states()) == ["kept"]
    toy.kept[1], toy.passing = 2, [3]
    toy.reset_state(saved_too=False)
    assert (toy.kept, toy.passing) == ({1: 2}, [])
    toy.reset_state()
    assert toy.kept == {}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("rate", "0.25", 0.25),
        ("rate", "auto", "auto"),
        ("count", "4", 4),
        ("steps", "1,2.5", (1.0, 2.5)),
        ("kind", "small", "small"),
        ("extra", "true", True),
    ],
)
def test_text_is_read_as_the_options_type(name, text, value):
    own = Larger.options()[name]
    assert own.from_text(text) == value
    assert own.from_text(str(own.plain(value))) == value
    refused("mine: expected int, got 'x'", Toy.options()["count"].from_text, "x", "mine")


def test_a_constructor_written_by_hand_is_handed_down():
    class ByHand(Toy):
        def __init__(self, twice: int) -> None:
            super().__init__(count=2 * twice)

    class Child(ByHand):
        pass

    assert Child(3).count == 6
