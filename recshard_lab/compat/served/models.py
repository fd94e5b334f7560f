"""``torchrec.models``."""

SERVED: dict[str, dict[str, str]] = {
    "torchrec.models": {},
    "torchrec.models.dlrm": {
        "models": "DLRM DLRMTrain DLRM_DCN DenseArch InteractionArch InteractionDCNArch OverArch SparseArch"
    },
    "torchrec.models.deepfm": {
        "models.deepfm": "DenseArch FMInteractionArch OverArch SimpleDeepFMNN SparseArch",
    },
}
