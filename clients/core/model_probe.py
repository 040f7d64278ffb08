"""What a client finds out about its model before it answers: dtypes, and what one example gives."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from fedntk.ntk.losses import Loss, require_scores


def check_dtypes(model: nn.Module, allowed: Collection[torch.dtype]) -> None:
    """Refuse a model with parameters or buffers of a floating-point dtype that cannot travel."""
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model: expected an nn.Module as the first argument, got {got}")
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.dtype not in allowed:
            names = " or ".join(dtype_name(dtype) for dtype in allowed)
            raise ValueError(
                f"model: expected arrays of {names}, which can be sent, got "
                f"{dtype_name(tensor.dtype)} in {name}; convert it with model.float()"
            )


def cast_examples(x: Tensor, model: nn.Module) -> Tensor:
    """Return floats in the model's dtype; refuse float64 if float32 keeps less than 10 bits."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), x.dtype)
    if not x.is_floating_point():
        return x
    cast = x.to(dtype)
    if (x.dtype, dtype) == (torch.float64, torch.float32) and len(x):
        spread, lost = x.amax(0) - x.amin(0), (x - cast).abs().amax(0)
        if bool(lost[spread > 0].sum() > spread.sum() / 2**10):
            raise ValueError(
                f"x: expected examples whose differences float32 can hold, got float64 of up to "
                f"{float(x.abs().max()):g}; subtract their mean, or give the model model.double()"
            )
    return cast


@torch.no_grad()
def num_outputs(model: nn.Module, example: Tensor, loss: Loss, *, fewest: int = 2) -> int:
    """Return the number of classes C, at least `fewest`; leave the model in evaluation mode.

    The model is given the `example` (1, ...) twice: one may be taken for one without a batch.
    """
    shape = f"shape {tuple(example.shape[1:])} and dtype {dtype_name(example.dtype)}"
    model.eval()
    try:
        outputs = model(torch.cat([example, example]))
    except Exception as error:
        raise ValueError(
            f"model: expected it to take examples of {shape}, got its error: {one_line(error)}; "
            f"{_cure(example)}"
        ) from error
    if not isinstance(outputs, Tensor):
        part = "output.logits" if hasattr(outputs, "logits") else "only the scores"
        raise ValueError(
            f"model: expected one tensor of scores (n, C), got a {type(outputs).__name__}; wrap "
            f"the model in one whose forward returns {part}"
        )
    scores = tuple(outputs.shape)
    if scores == (2,) or (scores == (2, 1) and fewest > 1):
        raise ValueError(
            f"model: expected scores of at least two classes, got one number per example (shape "
            f"{scores} for 2 examples); give its last layer two outputs"
        )
    if len(scores) != 2 or scores[0] != 2 or not outputs.is_floating_point():
        raise ValueError(
            f"model: expected scores of shape (2, C) for 2 examples of {shape}, got "
            f"{dtype_name(outputs.dtype)} of shape {scores}; have its forward return a row for each"
        )
    numbers = outputs[0].cpu().double().numpy()
    low, high = numbers.min(), numbers.max()
    if (low >= 0 and high <= 1) or high <= 0:  # else a graph would only cost time
        with torch.enable_grad():
            require_scores(model(torch.cat([example, example])), loss)
    return scores[1]


def training_pass(model: nn.Module, x: Tensor) -> Any:
    """Return what a model in training mode makes of x; refuse one example under BatchNorm."""
    try:
        return model(x)
    except ValueError as error:
        if len(x) > 1 or "more than 1 value per channel" not in str(error):
            raise
        raise ValueError(
            "x: expected batches of at least 2 examples, since the model has BatchNorm, got 1; "
            "give more examples, another batch_size or sampling_rate, or use GroupNorm"
        ) from error


def training_outputs(model: nn.Module, x: Tensor, num_outputs: int) -> Tensor:
    """Return f(x) (n, C) in training mode; refuse other outputs than those of evaluation."""
    outputs = training_pass(model, x)
    if isinstance(outputs, Tensor) and outputs.shape == (len(x), num_outputs):
        return outputs
    shape = f" of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else ""
    raise ValueError(
        f"model: expected one tensor of scores ({len(x)}, {num_outputs}) in training mode, as in "
        f"evaluation mode, got a {type(outputs).__name__}{shape}; switch auxiliary outputs off "
        "(aux_logits=False), or wrap the model in one that returns only the scores"
    )


def _cure(example: Tensor) -> str:
    cures, sizes = [], example.shape[1:]
    if example.dtype == torch.uint8:
        cures.append("x.float() / 255, of arrays or in the dataset's transform")
    elif not example.is_floating_point():
        cures.append("x.float()")
    if len(sizes) == 3 and sizes[2] in (1, 3, 4) and sizes[0] not in (1, 3, 4):
        cures.append("x.permute(0, 3, 1, 2), which puts channels first")
    if len(sizes) == 2:
        cures.append("x.unsqueeze(1), which adds the channel of images")
    if cures:
        return f"try {', and '.join(cures)}"
    return "give examples of the shape and dtype that it takes"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without torch's."""
    return str(dtype).removeprefix("torch.")


def one_line(error: Exception) -> str:
    """Return an error's message in one line, of at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__
