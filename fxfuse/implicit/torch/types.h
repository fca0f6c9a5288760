// Stands for torch's, which load_inline of torch before 2.7 includes in CUDA sources: kernels use nothing of it.
