"""The page at `/`: a chat in the browser, and what the cache looks at. Its files need no build step and ask no other host.

The files hold nothing of the model, so they need no key: the page asks for it, and sends it with its requests.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parents[1] / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PATHS = {"/": "index.html"} | {f"/page/{file.name}": file.name for file in sorted(FOLDER.iterdir()) if file.suffix in TYPES}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def page(request: Request) -> Response:
    """Returns a file of the page."""
    file = FOLDER / PATHS[request.scope["path"]]
    return Response(file.read_bytes(), headers=HEADERS, media_type=TYPES[file.suffix])
