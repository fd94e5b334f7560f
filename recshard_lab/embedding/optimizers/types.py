"""The fused optimizers and their modes of weight decay, under fbgemm's names and values."""

from __future__ import annotations

from enum import Enum, IntEnum, unique


class EmbOptimType(Enum):
    """The fused optimizers, under fbgemm's names. fbgemm's approximate variants are aliases of the exact ones.

    >>> EmbOptimType("exact_sgd")
    <EmbOptimType.EXACT_SGD: 'exact_sgd'>
    >>> EmbOptimType.ROWWISE_ADAGRAD is EmbOptimType("row_wise_adagrad") is EmbOptimType.EXACT_ROWWISE_ADAGRAD
    True
    """

    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    SGD = EXACT_SGD
    ROWWISE_ADAGRAD = EXACT_ROWWISE_ADAGRAD

    @classmethod
    def _missing_(cls, value: object) -> EmbOptimType | None:
        return {"sgd": cls.EXACT_SGD, "row_wise_adagrad": cls.EXACT_ROWWISE_ADAGRAD}.get(str(value))

    def __str__(self) -> str:
        return self.value


@unique
class WeightDecayMode(IntEnum):
    """How ``weight_decay`` changes touched rows: through the gradient (L2) or beside it (DECOUPLE)."""

    NONE = 0
    L2 = 1
    DECOUPLE = 2


def optim_type(value: EmbOptimType | str | Enum) -> EmbOptimType:
    """`EmbOptimType` from itself, its value, or a member of fbgemm's own enum.

    Raises:
        ValueError: an unsupported optimizer; the message names the supported ones.
    """
    if isinstance(value, EmbOptimType):
        return value
    text = value.value if isinstance(value, Enum) else value
    try:
        return EmbOptimType(text)
    except ValueError:
        supported = ", ".join(member.value for member in EmbOptimType)
        raise ValueError(f"optimizer {value!r} is not supported. Fix: choose one of {supported}") from None


def decay_mode(value: WeightDecayMode | int | str) -> WeightDecayMode:
    """`WeightDecayMode` from itself, its name or number, or a member of fbgemm's own enum.

    Raises:
        ValueError: an unsupported mode; the message names the supported ones.
    """
    for member in WeightDecayMode:
        if isinstance(value, str):
            if value.upper() == member.name:
                return member
        elif isinstance(value, int) and not isinstance(value, bool) and value == member.value:
            return member
    supported = ", ".join(member.name for member in WeightDecayMode)
    raise ValueError(f"weight_decay_mode {value!r} is not supported. Fix: choose one of {supported}")
