"""`PAGE`: the page at ``/``, and what a browser may do with it."""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

__all__ = ["page"]


async def page(request: Request) -> Response:
    """``GET``."""
    return Response(PAGE, headers=HEADERS, media_type="text/html")


def _policy(html: str) -> str:
    """Nothing but the page's own script and style runs, and it talks to this server only."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in found)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


PAGE = files("aphoton_serve").joinpath("page.html").read_text(encoding="utf-8")
HEADERS = {"content-security-policy": _policy(PAGE), "referrer-policy": "no-referrer", "cache-control": "no-cache"}
