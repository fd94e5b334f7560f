"""DLRM models and DeepFM: names and order of parameters, first weights of a seed, outputs, wrappers."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models import deepfm, dlrm

from tests.compat.parity.case import case, raised

DLRM, DEEPFM = "torchrec.models.dlrm", "torchrec.models.deepfm"


def tables() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name="t1", embedding_dim=4, num_embeddings=5, feature_names=["f1", "f3"]),
            EmbeddingBagConfig(name="t2", embedding_dim=4, num_embeddings=6, feature_names=["f2"]),
        ]
    )


def ids() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f1", "f3", "f2"], torch.tensor([1, 2, 3, 0]), lengths=torch.tensor([1, 0, 1, 1, 0, 1]))


def weights(model: nn.Module) -> dict[str, Any]:
    """Name -> shape, first number and sum, in order."""
    return {
        "names": list(model.state_dict()),
        "parameters": [name for name, _ in model.named_parameters()],
        "values": [[list(w.shape), w.flatten()[0].item(), w.sum().item()] for w in model.state_dict().values()],
        "next": torch.rand(1),
    }


def run(model: nn.Module) -> Any:
    """Logits, and the gradient of each parameter."""
    out = model(torch.arange(6.0).reshape(2, 3), ids())
    out.square().sum().backward()
    return {"out": out, "grads": [p.grad.sum().item() for p in model.parameters()]}


def plain() -> Any:
    return dlrm.DLRM(tables(), 3, [5, 4], [6, 1])


@case(f"{DLRM}.DLRM")
def dlrm_first_weights() -> Any:
    return weights(plain())


@case(f"{DLRM}.DLRM")
def dlrm_logits_and_gradients() -> Any:
    return run(plain())


@case(f"{DLRM}.DLRM")
def dlrm_tables_at_their_path() -> Any:
    return list(plain().sparse_arch.embedding_bag_collection.embedding_bags)


@case(f"{DLRM}.DLRM")
def dlrm_steps_with_sgd() -> Any:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3), ids()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [loss.item() for loss in losses]


@case(f"{DLRM}.DLRM")
def dlrm_of_a_wrong_width() -> Any:
    return raised(lambda: dlrm.DLRM(tables(), 3, [5, 3], [6, 1]))


@case(f"{DLRM}.DLRM")
def dlrm_with_one_top_layer() -> Any:
    return raised(lambda: dlrm.DLRM(tables(), 3, [5, 4], [1]))


@case(f"{DLRM}.DLRM")
def dlrm_on_meta() -> Any:
    meta = torch.device("meta")
    table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=5, feature_names=["f"])
    model = dlrm.DLRM(EmbeddingBagCollection([table], device=meta), 3, [4], [6, 1], dense_device=meta)
    return [[name, p.device.type] for name, p in model.named_parameters()]


@case(f"{DLRM}.DLRM")
def dlrm_compiled_dense_path() -> Any:
    model = plain()
    model.compile_dense_path("default")
    model.compile_dense_path("default")
    return list(model.state_dict())


@case(f"{DLRM}.DLRMTrain")
def dlrm_train_first_weights() -> Any:
    return weights(dlrm.DLRMTrain(plain()))


@case(f"{DLRM}.DLRMTrain")
def dlrm_train_loss() -> Any:
    batch = SimpleNamespace(
        dense_features=torch.ones(2, 3), sparse_features=ids(), labels=torch.tensor([1, 0], dtype=torch.int32)
    )
    loss, (again, logits, labels) = dlrm.DLRMTrain(plain())(batch)
    return {"loss": loss, "again": again, "logits": logits, "labels": labels, "grad": again.requires_grad}


@case(f"{DLRM}.DLRM_DCN")
def dcn_first_weights() -> Any:
    return weights(dlrm.DLRM_DCN(tables(), 3, [5, 4], [6, 1], 2, 3))


@case(f"{DLRM}.DLRM_DCN")
def dcn_logits_and_gradients() -> Any:
    return run(dlrm.DLRM_DCN(tables(), 3, [5, 4], [6, 1], dcn_num_layers=2, dcn_low_rank_dim=3))


@case(f"{DLRM}.DLRM_DCN")
def dcn_is_a_dlrm() -> Any:
    return isinstance(dlrm.DLRM_DCN(tables(), 3, [4], [6, 1], 1, 1), dlrm.DLRM)


@case(f"{DLRM}.DLRM_Projection")
def projection_first_weights() -> Any:
    return weights(dlrm.DLRM_Projection(tables(), 3, [5, 4], [6, 1], [7, 8], [12]))


@case(f"{DLRM}.DLRM_Projection")
def projection_logits_and_gradients() -> Any:
    return run(dlrm.DLRM_Projection(tables(), 3, [5, 4], [6, 1], [8], [12]))


@case(f"{DLRM}.DLRM_Projection")
def projection_of_a_wrong_width() -> Any:
    return [
        raised(lambda: dlrm.DLRM_Projection(tables(), 3, [5, 4], [6, 1], [7], [8])),
        raised(lambda: dlrm.DLRM_Projection(tables(), 3, [5, 4], [6, 1], [8], [7])),
    ]


@case(f"{DLRM}.InteractionProjectionArch")
def projection_interaction() -> Any:
    arch = dlrm.InteractionProjectionArch(2, nn.Identity(), nn.Identity())
    return arch(torch.rand(2, 3), torch.rand(2, 2, 3))


@case(f"{DLRM}.InteractionArch")
def dot_interaction() -> Any:
    return dlrm.InteractionArch(3)(torch.rand(2, 4), torch.rand(2, 3, 4))


@case(f"{DLRM}.InteractionDCNArch")
def cross_interaction() -> Any:
    return dlrm.InteractionDCNArch(2, nn.Identity())(torch.rand(2, 3), torch.rand(2, 2, 3))


@case(f"{DLRM}.DenseArch")
def dense_arch() -> Any:
    arch = dlrm.DenseArch(3, [4, 2])
    return {"names": list(arch.state_dict()), "out": arch(torch.rand(2, 3))}


@case(f"{DLRM}.OverArch")
def over_arch() -> Any:
    arch = dlrm.OverArch(3, [4, 1])
    return {
        "names": list(arch.state_dict()),
        "out": arch(torch.rand(2, 3)),
        "one": raised(lambda: dlrm.OverArch(3, [1])),
    }


@case(f"{DLRM}.SparseArch")
def sparse_arch() -> Any:
    arch = dlrm.SparseArch(tables())
    return {"names": list(arch.state_dict()), "out": arch(ids()), "features": arch.sparse_feature_names}


@case(f"{DEEPFM}.SimpleDeepFMNN")
def deepfm_first_weights() -> Any:
    return weights(deepfm.SimpleDeepFMNN(3, tables(), 5, 6))


@case(f"{DEEPFM}.SimpleDeepFMNN")
def deepfm_outputs_and_gradients() -> Any:
    return run(deepfm.SimpleDeepFMNN(3, tables(), hidden_layer_size=5, deep_fm_dimension=6))
