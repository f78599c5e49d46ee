"""A fault in vLLM's workers: packed layers keep computing with the weights of the start.

Loading weights into the modules' parameters alone does this on CPU, without an error.
"""

from actors.engines.vllm_weights import WorkerExtension
from actors.weights.vllm_shadow import PACKED, ShadowModel

_exchange = ShadowModel.exchange


def exchange_parameters_only(shadow: ShadowModel) -> None:
    for module in shadow._modules.modules():
        vars(module).pop(PACKED, None)
    _exchange(shadow)


ShadowModel.exchange = exchange_parameters_only


class DeafExtension(WorkerExtension):
    """Imported by every worker that is started with it."""
