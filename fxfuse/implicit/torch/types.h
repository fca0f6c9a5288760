// Stands in for torch's header of this name. Before torch 2.7, load_inline includes that header in CUDA sources.
// Kernels use nothing of it.
