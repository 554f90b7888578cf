/* Which backend a name gives, and what is said when there is none. */
#include <criterion/criterion.h>
#include <string.h>

#include "backend.h"
#include "leaks.h"

TestSuite(backend, .fini = leaks_check);

Test(backend, names)
{
    struct errmsg e = {{0}};
    cr_assert(backend_find("cpu", &e) == &backend_cpu_ops);
    cr_assert_null(backend_find("metal", &e));
    cr_assert(strstr(e.text, "metal") && strstr(e.text, "auto, cpu, cuda"), "%s", e.text);
}

/* auto takes the CPU only where no driver is installed; a driver that fails is for open to
 * say. */
Test(backend, auto_follows_the_driver)
{
    struct errmsg e = {{0}};
    const struct backend_ops *ops = backend_find("auto", &e);
    cr_assert_not_null(ops);
    cr_assert_str_eq(ops->name, cuda_has_driver() ? "cuda" : "cpu");
}

Test(backend, cuda_refuses_in_words)
{
    struct errmsg e = {{0}};
    struct backend b;
    if (cuda_has_driver())
        cr_skip_test("a driver is installed");
    const struct backend_ops *ops = backend_find("cuda", &e);
    cr_assert(!ops || ops->open(&b, 0, &e) == ERR_UNSUPPORTED);
    cr_assert(strstr(e.text, ops ? "no NVIDIA driver" : "--with-cuda"), "%s", e.text);
}
