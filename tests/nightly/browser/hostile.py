"""Texts that would like to be more than texts, in every field that a stranger can write."""

import itertools
import re
from typing import Any

from bartleby import Client, Failure

HERE = "http://evil.example"
_FORBIDDEN = re.compile(r'[\s<>"]')  # the database takes no link with these
_HANDLERS = ("onerror", "onload", "onfocus", "onmouseover", "onanimationstart", "ontoggle", "onpointerenter", "onbegin")
_TAGS = (
    "<script>hit('script')</script>", "<SCRIPT SRC=//evil.example/x.js></SCRIPT>",
    "<scr<script>ipt>hit('nested')</scr</script>ipt>", "<script type=module>hit('module')</script>",
    "<script>\\u0068it('escaped')</script>", "</script><script>hit('closed')</script>",
    "</title><script>hit('title')</script>", "</textarea><script>hit('textarea')</script>",
    "</pre></code></td></tr></table><script>hit('table')</script>", "</template><script>hit('template')</script>",
    "</style><script>hit('style')</script>", "</noscript><script>hit('noscript')</script>",
    "--><script>hit('comment')</script><!--", "]]><script>hit('cdata')</script><![CDATA[",
    "<!--[if gte IE 4]><script>hit('conditional')</script><![endif]-->",
    "<iframe srcdoc='<script>parent.hit(1)</script>'></iframe>",
    "<iframe src=javascript:parent.hit('iframe')></iframe>", "<object data=javascript:hit('object')></object>",
    "<embed src=//evil.example/x.swf>", "<base href=//evil.example/>",
    "<meta http-equiv=refresh content='0;url=//evil.example/'>", "<link rel=stylesheet href=//evil.example/x.css>",
    "<style>@import '//evil.example/x.css';</style>", "<style>*{background:url(//evil.example/leak)}</style>",
    "<form action=//evil.example/><button>Replay</button></form>", "<input autofocus onfocus=hit('autofocus')>",
    "<details open ontoggle=hit('details')>", "<marquee onstart=hit('marquee')>x</marquee>",
    "<audio src onerror=hit('audio')>", "<video><source onerror=hit('video')></video>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=hit('mutation')>",
    "<noscript><p title='</noscript><img src=x onerror=hit(2)>'>",
    "<dialog open class=hostile>Type your password</dialog>",
    "<a id=hostile name=hostile href=//evil.example>click</a>", "<img name=getElementById><form id=notices>",
    "<custom-element is=hostile></custom-element>",
)  # fmt: skip
_SVG = (
    "<svg onload=hit('svg')>", "<svg><script>hit('svg script')</script></svg>",
    "<svg><script href=//evil.example/x.js /></svg>",
    "<svg><a xlink:href=javascript:hit('svg a')><text y=20>x</text></a></svg>",
    "<svg><animate onbegin=hit('animate') attributeName=x dur=1s>",
    "<svg><set attributeName=href to=javascript:hit('set')></svg>",
    "<svg><foreignObject><img src=x onerror=hit('foreign')></foreignObject></svg>",
    "<svg><use href='data:image/svg+xml,<svg id=x onload=hit(3)>#x'></use></svg>",
    "<svg><image href=//evil.example/leak.png></svg>", "<svg><style><img src=x onerror=hit('svg style')></style></svg>",
)  # fmt: skip
_ATTRIBUTES = (
    '"><script>hit("quote")</script>', "'><script>hit('apostrophe')</script>", '" autofocus onfocus="hit(4)" x="',
    "' autofocus onfocus='hit(5)' x='", "` onerror=hit(6) `", '"onmouseover=hit(7)//',
    '" style="position:fixed;inset:0;background:url(//evil.example/leak)', '" hx-get="/hostile" hx-trigger="load" x="',
    '" data-copy="hostile" data-go="x" data-key="r', '"/><img src=//evil.example/leak.png>',
    "x\" formaction=\"javascript:hit('formaction')", '\\"><img src=x onerror=hit(8)>',
)  # fmt: skip
_LINKS = (
    "javascript:hit('link')", "JaVaScRiPt:hit('mixed')", "java\tscript:hit('tab')", "\x01javascript:hit('control')",
    "javascript://evil.example/%0ahit(9)", "data:text/html,<script>opener.hit(10)</script>",
    "data:text/html;base64,PHNjcmlwdD5oaXQoMTEpPC9zY3JpcHQ+", "vbscript:hit(12)", "//evil.example/",
    'https://evil.example/" onclick="hit(13)', "[click](javascript:hit('markdown'))", "![x](//evil.example/leak.png)",
)  # fmt: skip
_TEMPLATES = (
    "{{ 7 * 7 }}{{ config }}", "{{ ''.__class__.__mro__ }}", "{% include '/etc/passwd' %}",
    "{% raw %}<script>hit('raw')</script>{% endraw %}", "{# comment #}<script>hit('after comment')</script>",
    "${hit('literal')}", "#{hit('ruby')}", "<%= hit('erb') %>", "<div hx-get=/hostile hx-trigger=load></div>",
    "<div data-hx-get=/hostile data-hx-trigger=load></div>", "<div hx-on:click=hit(14) hx-on::load=hit(15)></div>",
    "<div hx-vals='js:{x: hit(16)}' hx-post=/hostile hx-trigger=load></div>",
    "<form hx-post=/queues/hostile/pause hx-trigger=load><input name=reason value=hostile></form>",
    "<hx-partial hx-target=#main><script>hit('partial')</script></hx-partial>",
    "<div hx-swap-oob=true id=main>hostile</div>", "<meta name=htmx-config content='{\"allowEval\":true}'>",
)  # fmt: skip
_ENTITIES = (
    "&lt;script&gt;hit('entity')&lt;/script&gt;", "&#60;script&#62;hit('decimal')&#60;/script&#62;",
    "&#x3c;img src=x onerror=hit(17)&#x3e;", "&amp;lt;img src=x onerror=hit(18)&amp;gt;",
    "%3Cscript%3Ehit('percent')%3C/script%3E", "\\u003cscript\\u003ehit('json')\\u003c/script\\u003e",
    "\uff1cscript\uff1ehit('full width')\uff1c/script\uff1e", "+ADw-script+AD4-hit('utf-7')+ADw-/script+AD4-",
)  # fmt: skip
_LETTERS = (
    "\u202egnp.exe<script>hit('rtl')</script>", "\u2066isolated\u2069 \u200fmarks\u200e",
    "admin\u200b\u2060\ufeff\u00ad", "tags \U000e0068\U000e0069\U000e0064",
    "a\u0301\u0302\u0303\u0304\u0305\u0306 piled", "\x1b[2J\x1b]0;owned\x07\x1b[31mred",
    "\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\", "back\x08\x08\x08space \x7f delete",
    "line\u2028separator\u2029paragraph", "\U0001f469\u200d\U0001f4bb works", "9" * 90,
)  # fmt: skip
STRINGS: tuple[str, ...] = (
    *_TAGS, *(f"<img src=x {each}=hit('{each}')>" for each in _HANDLERS), *_SVG, *_ATTRIBUTES, *_LINKS, *_TEMPLATES,
    *_ENTITIES, *_LETTERS,
)  # fmt: skip


def furnish(client: Client) -> dict[str, Any]:
    """Put every text into every field; return ids by what they are for."""
    client.create_queue("orders")
    client.create_queue("mail")
    letters = [_letter(client, number, text) for number, text in enumerate(STRINGS)]
    whole = _whole(client)
    groups = sorted(client.groups(limit=200), key=lambda each: each.id)
    for group, text in zip(groups, itertools.cycle(STRINGS), strict=False):
        client.acknowledge_group(
            group.id, owner=text, link=f"{HERE}/{_FORBIDDEN.sub('', text)}", actor=text, reason=text, request_id=None
        )
    plans = []
    for number, text in enumerate(STRINGS[::10]):
        patch = [{"op": "add", "path": "/hostile", "value": text}]
        plans.append(int(client.plan_replay(ids=letters[number : number + 3], actor=text, reason=text, patch=patch)))
        client.put_sink(f"sink-{number}", "log", {}, actor=text, reason=text)
        client.report_sink(f"sink-{number}", failures=1, error=text)
        client.hold([letters[-1 - number]], actor=text, reason=text)
    client.merge_groups([groups[1].id], into=groups[0].id, actor=STRINGS[0], reason=STRINGS[1])
    client.split_group(groups[0].id, "payload.text", STRINGS[36], title=STRINGS[2], actor=STRINGS[3], reason=STRINGS[4])
    client.pause_queue("mail", actor=STRINGS[36], reason=STRINGS[37])
    for number, text in enumerate(STRINGS):
        client.report_worker(text, version=text, queues=["orders"], host=text, pid=number + 1, concurrency=1, running=0)
        if text.isprintable():  # no other is a name
            client.add_token("token", text, f"{number:064x}", role="reader", actor=text, reason=text)
    return {"letters": letters, "whole": whole, "groups": [int(each.id) for each in groups], "plans": plans}


def _letter(client: Client, number: int, text: str) -> int:
    """A letter whose every field is one text."""
    (sent,) = client.send_many(
        "orders", [{"payload": {"text": text, text: {"n": number}}, "headers": {text: text}, "key": text}]
    )
    _die(client, "orders", text, text, f"{number} {text}")
    return int(sent)


def _whole(client: Client) -> int:
    """A letter that has all the texts in one document, and in its trace; it fails differently twice before it dies."""
    payload = {"list": list(STRINGS), **{text: text for text in STRINGS}}
    headers = {text: text for text in STRINGS}
    (sent,) = client.send_many("mail", [{"payload": payload, "headers": headers, "key": STRINGS[0]}])
    trace = "Traceback (most recent call last):\n" + "\n".join(
        f'  File "/srv/{number}.py", line {number}, in {text}\n    {text}' for number, text in enumerate(STRINGS)
    )
    for attempt in range(3):
        verdict = "dead" if attempt == 2 else "retry"
        _die(client, "mail", STRINGS[attempt], "\n".join(STRINGS[attempt:]), "whole", verdict=verdict, trace=trace)
    return int(sent)


def _die(
    client: Client, queue: str, kind: str, error: str, grouped: str, *, verdict: str = "dead", trace: str | None = None
) -> None:
    lease = client.claim(queue, kind, limit=1)
    assert lease
    failure = Failure(
        lease.messages[0].position, kind, error, traceback=trace or f'  File "{kind}", line 1, in {kind}\n    {error}',
        fingerprint=grouped, verdict=verdict, delay=0.0 if verdict == "retry" else None, rule=kind, worker_version=kind,
        handler=queue,
    )  # fmt: skip
    client.fail(lease.id, [failure])
