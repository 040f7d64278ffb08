"""Client of SAFLe: it also tells means and deviations of its network's frozen features."""

from fedntk.ntk import Moments
from fedntk.ntk.features.layers import OverlapCodes

from ..core.weights import Config, Parameters
from .closed_form import ClosedFormClient


class SAFLeClient(ClosedFormClient):
    """Sends sums over its examples' overlap codes, and before them moments of what is coded."""

    strategy = "SAFLe"

    def query(self, parameters: Parameters, config: Config) -> dict[str, list[float] | int]:
        """Return ``mean`` and ``sum-sq-dev`` (d numbers each) of the codes' inputs, and how many.

        They are those of :class:`~fedntk.ntk.Moments`.
        """
        self.require_permitted("query")
        x, _ = self.training_examples(config)
        self.load_network(parameters)
        if (named := OverlapCodes.find(self.model)) is None:
            raise ValueError(
                "network: expected OverlapCodes, got none; make it with "
                "fedntk.ntk.with_overlap_codes, as on the server"
            )
        parts = list[Moments]()
        hook = named[1].register_forward_pre_hook(
            lambda _, inputs: parts.append(Moments.of(inputs[0].cpu()))
        )
        try:
            self.outputs(x)
        finally:
            hook.remove()
        joint = Moments.join(parts)
        lists = {name: array.tolist() for name, array in joint.to_arrays().items()}
        return {**lists, "num-examples": joint.count}
