"""``torchrec.models``."""

SERVED: dict[str, dict[str, str]] = {
    "torchrec.models": {},
    "torchrec.models.dlrm": {
        "models": "DLRMTrain InteractionArch InteractionDCNArch SparseArch",
        "compat.models.dlrm": "DLRM DLRMWrapper DLRM_DCN DLRM_Projection DenseArch "
        "InteractionProjectionArch OverArch choose",
    },
    "torchrec.models.deepfm": {
        "models.deepfm": "DenseArch FMInteractionArch OverArch SimpleDeepFMNN SparseArch",
        "compat.models.deepfm": "SimpleDeepFMNNWrapper",
    },
}
