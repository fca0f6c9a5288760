// Stands for torch's, which load_inline of torch before 2.7 includes in every source: kernels use nothing of it, and
// compiling it takes a minute and a gigabyte of memory.
