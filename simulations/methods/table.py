"""The table of the methods, and how a setting names one.

Another package names a :class:`~fedntk.simulations.methods.method.Method` in the entry-point group
``fedntk.methods``::

    [project.entry-points."fedntk.methods"]
    my-method = "my_package.my_method:METHOD"

A method of a user's own has no such name. The setting ``method`` holds where its strategy is:
``/home/me/mymethod.py:FedAvgM`` or ``my_module:FedAvgM``, and after a comma the class of its
clients, if the strategy does not name it. ``__main__`` is a notebook's cells.
"""

import functools
import importlib.metadata
from collections.abc import Mapping
from logging import getLogger
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from torch import nn

from fedntk import strategies
from fedntk.ntk import with_overlap_codes, with_residual_features
from fedntk.ntk.features.layers import LARGEST_GROUP
from fedntk.ntk.options import nearest
from fedntk.ntk.support.files import whole

from ..config.config import BaseConfig
from ..config.importing import (
    ID,
    import_named,
    name_object,
    place_of,
    require_importable,
    whole_name,
)
from ..config.settings import Settings, setting
from ..errors import ConfigError, first_line
from . import fed_be, fed_ensemble, glm, ntk_fl, sums, tct
from .decentralised import DecentralisedMethod
from .method import Method, named_client

logger = getLogger("flwr")


class DeepAFLSettings(Settings, frozen=True, eq=True):
    """The blocks, which strategy and clients find in their network; the run's seed gives them."""

    layers: int = setting(3, "blocks: one is computed in a round", at_least=1)
    block_width: int = setting(500, "m, random features of a block", at_least=1)


class _DeepAFL(Method):
    name = "deep-afl"
    strategy_class = strategies.DeepAFL
    own_settings = DeepAFLSettings
    baseline = True

    def adapt(self, network: nn.Module, config: BaseConfig) -> nn.Module:
        settings = self.settings_in(config)
        return with_residual_features(network, settings.layers, settings.block_width, config.seed)


class SAFLeSettings(Settings, frozen=True, eq=True):
    """The codes, which strategy and clients find in their network; the run's seed mixes them."""

    limits: int = setting(1, "L, bits of a feature; 0: features as they are, AFL", at_least=0)
    group_size: int = setting(
        5, "G, bits that choose one of V = 2^G rows", at_least=1, at_most=LARGEST_GROUP
    )


class _SAFLe(Method):
    name = "safle"
    strategy_class = strategies.SAFLe
    own_settings = SAFLeSettings
    baseline = True

    def adapt(self, network: nn.Module, config: BaseConfig) -> nn.Module:
        settings = self.settings_in(config)
        if not settings.limits:
            return network
        return with_overlap_codes(network, settings.limits, settings.group_size, config.seed)


class _WeightedFedAvg(Method):
    name = "weighted-fedavg"
    strategy_class = strategies.WeightedFedAvg
    headline = "client-accuracy-mean"
    metrics = ("effective-clients", "own-weight-mean", "similarity-mean")

    def after_round(self, strategy: strategies.Strategy, server_round: int, folder: Path) -> None:
        """Write the mixing weights, ``similarity-<round>.npz``, unless nothing was mixed."""
        mixing = cast(strategies.WeightedFedAvg, strategy).mixing
        if mixing is not None and mixing.server_round == server_round:
            with whole(folder / f"similarity-{server_round:06}.npz") as file:
                np.savez(file, **mixing._asdict())


# of methods whose models are the clients' own: they are judged by the clients' evaluations
PERSONAL: dict[str, Any] = {"baseline": True, "headline": "client-accuracy-mean"}
MASKED = (*DecentralisedMethod.metrics, "mask-density", "mask-changed")
EVOLVED = (*DecentralisedMethod.metrics, "t")
METHODS: tuple[Method, ...] = (
    _DeepAFL(),
    fed_be.METHOD,
    fed_ensemble.METHOD,
    glm.METHOD,
    *ntk_fl.METHODS,
    sums.METHOD,
    _SAFLe(),
    tct.METHOD,
    _WeightedFedAvg(),
    Method("afl", strategies.AFL, baseline=True),
    Method("fed-cof", strategies.FedCOF, baseline=True),
    Method("fed-ncm", strategies.FedNCM, baseline=True),
    Method("fed3r", strategies.Fed3R, baseline=True),
    Method("fed-adam", strategies.FedAdam, baseline=True),
    Method("fed-yogi", strategies.FedYogi, baseline=True),
    Method("fed-avgm", strategies.FedAvgM, baseline=True),
    Method("fed-dyn", strategies.FedDyn, baseline=True),
    Method("fed-nova", strategies.FedNova, metrics=("effective-steps",), baseline=True),
    Method("fedavg", strategies.SeededFedAvg, baseline=True, apart=("proximal_mu",)),
    Method("scaffold", strategies.SCAFFOLD, baseline=True),
    Method("ditto", strategies.Ditto, metrics=("personal-loss", "restarted"), **PERSONAL),
    Method("fed-babu", strategies.FedBABU, **PERSONAL),
    Method("fed-bn", strategies.FedBN, batch_norm=True, **PERSONAL),
    Method("fed-per", strategies.FedPer, **PERSONAL),
    Method("fed-proto", strategies.FedProto, learns_on_server=False, **PERSONAL),
    Method("fed-rep", strategies.FedRep, **PERSONAL),
    Method("local-training", strategies.LocalTraining, learns_on_server=False, **PERSONAL),
    DecentralisedMethod("d-psgd", strategies.DPSGD, baseline=True),
    DecentralisedMethod("dfedavg", strategies.DFedAvg, baseline=True),
    DecentralisedMethod("dfedsam", strategies.DFedSAM, baseline=True),
    DecentralisedMethod("dispfl", strategies.DisPFL, metrics=MASKED, **PERSONAL),
    DecentralisedMethod("ntk-dfl", strategies.NTKDFL, apart=("class_prior",), metrics=EVOLVED),
)


@functools.cache
def own_methods() -> Mapping[str, Method]:
    """Return the methods of this package, by name."""
    methods = {method.name: method for method in METHODS}
    return MappingProxyType(dict(sorted(methods.items())))


@functools.cache
def all_methods() -> Mapping[str, Method]:
    """Return the methods of this package and others, by name; faulty ones with a warning."""
    methods = dict(own_methods())
    for entry in importlib.metadata.entry_points(group="fedntk.methods"):
        try:
            method = entry.load()
            if not isinstance(method, Method):
                raise TypeError(f"expected an object of a subclass of Method, got {method!r}")
            if method.name in methods:
                raise ValueError(f"there is a method {method.name!r} already")
        except Exception as error:  # another package's fault must not stop all other methods
            fault = entry.name, entry.value, first_line(error)
            logger.warning("method %s (%s) is left out: %s", *fault)
        else:
            methods[method.name] = method
    return MappingProxyType(methods)


def find_method(named: Any, methods: Mapping[str, Any]) -> tuple[str, Method]:
    """Return what the setting ``method`` holds, and the method; ConfigError if none."""
    if isinstance(named, type):
        named = Method(named)
    if isinstance(named, Method):
        place, method = named.name, named
        if named not in all_methods().values():
            strategy, client = named.strategy_class, named.client_class
            other = "" if client is named_client(strategy) else f",{client.__qualname__}"
            place = name_object(named, place_of(strategy) + other)
    else:
        place = whole_name(str(named))
        method = all_methods().get(place) or methods.get(place) or import_method(place)
    if place not in all_methods() and (
        method.name in all_methods() or method.name.replace("-", "_") in BaseConfig.options()
    ):
        raise ConfigError(
            f"method = {place}: {method.name!r} is a method or a setting already; rename the "
            "class, or give name='...' to Method"
        )
    return place, method


def import_method(place: str) -> Method:
    """Import the method that the setting names; ConfigError if there is none."""
    home, colon, names = ID.sub("", place).rpartition(":")
    if not colon:
        raise ConfigError(
            f"method: expected one of {', '.join(all_methods())}, or <file>.py:<strategy>, got "
            f"{place!r}{nearest(place, all_methods())}"
        )
    things = [import_named("method", f"{home}:{name}") for name in names.split(",")]
    return things[0] if isinstance(things[0], Method) else Method(*things)


def require_importable_method(place: str, method: Method) -> None:
    """Refuse a method that other processes cannot import, or would find to be another."""
    if place in all_methods():
        return
    require_importable("method", place)
    theirs, ours = ({**vars(m), "settings": type(m)} for m in (import_method(place), method))
    require_importable("method", place, same=theirs == ours)
