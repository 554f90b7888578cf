dnl --with-cuda=DIR|no|auto. The CUDA backend is a later part of prefilld: the option exists so
dnl that build scripts need not change, and today every choice builds the null driver.
AC_ARG_WITH([cuda],
    [AS_HELP_STRING([--with-cuda=DIR|no|auto],
        [the CUDA Toolkit; auto looks for nvcc in PATH and /usr/local/cuda (default auto)])],
    [], [with_cuda=auto])
AS_CASE([$with_cuda],
    [no], [cuda_summary=no],
    [auto|yes], [cuda_summary="no (this version has no CUDA backend yet)"],
    [AS_IF([test -x "$with_cuda/bin/nvcc"],
        [cuda_summary="no (this version has no CUDA backend yet; found $with_cuda)"],
        [AC_MSG_ERROR([--with-cuda=$with_cuda: no bin/nvcc there; give the toolkit's directory, auto or no])])])
AM_CONDITIONAL([HAVE_CUDA], [false])
