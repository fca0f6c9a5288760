// Stands in for torch's header of this name. Before torch 2.7, load_inline includes that header in every source.
// Kernels use nothing of it, and compiling it takes a minute and a gigabyte of memory.
