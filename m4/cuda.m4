dnl --with-cuda=DIR|no|auto: the CUDA backend, where the CUDA Toolkit (nvcc, cudart, the headers of
dnl cuBLASLt) is. cudart is linked statically; cuBLASLt is opened when the backend is, so that the
dnl daemon starts on a machine without it. Sets HAVE_CUDA (config.h and Automake).
AC_ARG_WITH([cuda],
    [AS_HELP_STRING([--with-cuda=DIR|no|auto],
        [the CUDA Toolkit; auto looks for nvcc in PATH and /usr/local/cuda (default auto)])],
    [], [with_cuda=auto])

CUDA_HOME=
AS_CASE([$with_cuda],
    [no], [cuda_summary=no],
    [auto|yes], [
        AC_PATH_PROG([NVCC_FOUND], [nvcc], [], [$PATH$PATH_SEPARATOR/usr/local/cuda/bin])
        AS_IF([test -n "$NVCC_FOUND"], [
            dnl A link such as /usr/bin/nvcc leads to the toolkit's own.
            CUDA_HOME=`readlink -f "$NVCC_FOUND"`
            CUDA_HOME=`AS_DIRNAME(["$CUDA_HOME"])`
            CUDA_HOME=`AS_DIRNAME(["$CUDA_HOME"])`
            AS_IF([test -f "$CUDA_HOME/include/cublasLt.h"], [], [
                AS_IF([test "x$with_cuda" = xyes],
                    [AC_MSG_ERROR([--with-cuda: $NVCC_FOUND has no cublasLt.h beside it])])
                cuda_summary="no ($NVCC_FOUND has no cublasLt.h beside it)"
                CUDA_HOME=
            ])
        ], [
            AS_IF([test "x$with_cuda" = xyes],
                [AC_MSG_ERROR([--with-cuda: no nvcc in PATH or /usr/local/cuda/bin; give the toolkit's directory])])
            cuda_summary="no (no nvcc)"
        ])
    ],
    [
        CUDA_HOME=$with_cuda
        AS_IF([test -x "$CUDA_HOME/bin/nvcc"], [],
            [AC_MSG_ERROR([--with-cuda=$with_cuda: no bin/nvcc there; give the toolkit's directory, auto or no])])
        AS_IF([test -f "$CUDA_HOME/include/cublasLt.h"], [],
            [AC_MSG_ERROR([--with-cuda=$with_cuda: no include/cublasLt.h there; install cuBLAS beside nvcc])])
    ])

CUDA_LIBS=
AS_IF([test -n "$CUDA_HOME"], [
    cuda_summary=$CUDA_HOME
    AC_DEFINE([HAVE_CUDA], [1], [The CUDA backend is built.])
    CUDA_LIBS="-L$CUDA_HOME/lib64 -Wl,-rpath,$CUDA_HOME/lib64 -lcudart_static -ldl -lrt -lpthread"
], [
    AC_DEFINE([HAVE_CUDA], [0], [The CUDA backend is built.])
])
AC_SUBST([CUDA_HOME])
AC_SUBST([CUDA_LIBS])
AM_CONDITIONAL([HAVE_CUDA], [test -n "$CUDA_HOME"])
