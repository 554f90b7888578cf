/* GET /: the live page, one file without outside resources (etc/page.html), fed by
 * /v1/steps. */
#include <string.h>

#include "api_priv.h"

static const char page[] =
#include "src/page.inc"
    ;

void api_page(struct api *a, struct exchange *x)
{
    (void)a;
    struct buf b;
    buf_init(&b);
    buf_add(&b, page, sizeof(page) - 1);
    /* Scripts and styles of the page itself alone, and no other page around it. */
    exchange_add_header(x, "Content-Security-Policy",
                        "default-src 'none'; script-src 'unsafe-inline'; style-src "
                        "'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'");
    exchange_reply(x, 200, "text/html; charset=utf-8", &b);
}
