/* Leaks fail a Criterion program in an ASan build: Criterion itself does not look at the exit
 * status that LeakSanitizer gives a test's process, and counts a test before its teardown, so
 * the teardown ends as a crash, which the program's exit status shows.
 * Use: TestSuite(name, .fini = leaks_check); */
#ifndef PREFILLD_TESTS_LEAKS_H
#define PREFILLD_TESTS_LEAKS_H

#include <stdlib.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

__attribute__((unused)) static void leaks_check(void)
{
#ifdef __SANITIZE_ADDRESS__
    if (__lsan_do_recoverable_leak_check() != 0)
        abort();
#endif
}

#endif
