"""The operator's page at `/`: the KV memory as it is now, and who holds it.

- `routes.page_router`: the page, its files and the feed; read this first.
- `feed`: one sample a second for all pages together, as server-sent events.
- `view`: from the engine's snapshot to the words and shapes that are shown, by the template and by the script alike.
- `page.html`, `live.css`, `live.js`, `icon.svg`: what the browser gets; no build step, nothing from elsewhere.

Invariants: readable without the script; text from requests is only ever text (escaped here, `textContent` there); a
page that nobody looks at costs the engine nothing.
"""

from kvikk.server.page.feed import StateProvider
from kvikk.server.page.routes import page_router

__all__ = ["StateProvider", "page_router"]
