"""``torchrec.quant``: quantized collections with TorchRec's constructors, in `modules`, and their sharders."""
