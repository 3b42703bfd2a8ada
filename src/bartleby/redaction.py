"""Secrets are taken out of a failure before it is written: what is not stored cannot leak from a backup.

Every pattern has bounded repetitions and every text is bounded first, so a hostile text costs milliseconds at most.
"""

import re
from collections.abc import Callable, Sequence

from bartleby.errors import InvalidSettings
from bartleby.message import storable

_HIDDEN = "***"
_CUT_MARK = 60
_VALUE = r"""("(?:[^"\\\n]|\\.){0,1000}"?|'(?:[^'\\\n]|\\.){0,1000}'?|[^\s,;&)}\]"']{1,1000})"""
_KEY = (
    r"(?:passw(?:or)?d|passphrase|pwd|secret|credentials?|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|encryption[_-]?key|signing[_-]?key|account[_-]?key|auth[_-]?key|shared[_-]?key"
    r"|(?:access|refresh|auth|id|session|csrf|api|bearer|security|deploy)[_-]?token)"
)
SECRET_NAME = re.compile(rf"(?i){_KEY}|token|authori[sz]ation|cookie|jwt|\b(?:auth|pin|ssn|cvv|cvc|iban)\b|card_?n")
"""Finds a name whose value is nobody's business."""
_CARD = re.compile(
    r"(?<![\w.])(?:\d{4}[ -]\d{4}[ -]\d{4}[ -]\d{1,7}|\d{4}[ -]\d{6}[ -]\d{5}|[2-6]\d{12,15})(?![\w.]\d)"
)
_PRIVATE_KEY_END = re.compile(r"-----END [A-Z ]{0,40}PRIVATE KEY-----")

Rule = tuple[tuple[str, ...], "re.Pattern[str]", "str | Callable[[re.Match[str]], str]"]

# The lower-case words without which a pattern cannot match: looking for them is ten times cheaper than the pattern.
_RULES: tuple[Rule, ...] = (
    (
        ("private key-----",),
        re.compile(
            r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL
        ),
        "-----BEGIN PRIVATE KEY----- *** -----END PRIVATE KEY-----",
    ),
    (("://",), re.compile(r"(://[^\s:@/?#]{0,200}:)[^\s/?#]{1,500}@"), r"\1***@"),
    (("://",), re.compile(r"://[^\s:@/?#]{20,300}@"), "://***@"),
    (
        ("authorization", "cookie"),
        re.compile(
            r"""(?i)\b((?:proxy-)?authorization|(?:set-)?cookie)(["']?\s{0,3}[:=,]\s{0,3})([^\n"']{1,2000}|"[^"\n]{1,2000}|'[^'\n]{1,2000})"""
        ),
        r"\1\2***",
    ),
    (
        ("bearer", "basic"),
        re.compile(r"(?i)\b(bearer|basic)\s{1,3}(?=[a-z._~+/-]{0,200}[\d=])[\w.~+/=-]{8,4000}"),
        r"\1 ***",
    ),
    (
        ("pass", "pwd", "secret", "credential", "key", "token"),
        re.compile(rf"""(?i)({_KEY}\w{{0,20}}["'\]]{{0,2}}\s{{0,3}}(?:=>|[=:])\s{{0,3}})""" + _VALUE),
        r"\1***",
    ),
    (("token",), re.compile(r"""(?i)(token["']?(?:\s{0,3}=\s{0,3}|(?<=["']):\s{0,3}))""" + _VALUE), r"\1***"),
    # "unexpected token: foo" is what a parser says; nobody calls a word of 16 letters a token there
    (("token",), re.compile(r"(?i)(token\s{0,3}:\s{0,3})[\w.~+/=-]{16,1000}"), r"\1***"),
    (("signature", "sig="), re.compile(r"(?i)([?&](?:x-amz-)?sig(?:nature)?=)[^\s&\"']{1,1000}"), r"\1***"),
    (("eyj",), re.compile(r"(?<![\w-])eyJ[\w-]{6,4000}\.[\w-]{2,4000}(?:\.[\w-]{0,4000})?"), _HIDDEN),
    (("akia", "asia", "aroa", "aida"), re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,32}\b"), _HIDDEN),
    (
        ("gh", "glpat-", "xox", "k_live_", "k_test_", "sk-", "aiza", "npm_", "pypi-", "sg.", "hf_", "whsec_", "bly_"),
        re.compile(
            r"(?<![\w-])(?:gh[oprsu]_\w{20,300}|github_pat_\w{20,300}|glpat-[\w-]{16,300}|xox[a-z]-[\w-]{10,300}"
            r"|[psr]k_(?:live|test)_\w{10,300}|sk-[\w-]{20,300}|AIza[\w-]{30,100}|npm_\w{20,300}|pypi-[\w-]{20,300}"
            r"|SG\.[\w-]{10,100}\.[\w-]{10,100}|hf_\w{20,100}|whsec_[\w+/=]{10,100}|bly_[\w-]{43})"
        ),
        _HIDDEN,
    ),
)


class Redactor:
    """Takes secrets out of texts, those everybody has and those of the patterns given."""

    def __init__(self, patterns: Sequence[str | re.Pattern[str]] = ()) -> None:
        self._patterns = [_compiled(pattern) for pattern in patterns]

    def clean(self, text: str, limit: int) -> str:
        """Return a text that can be stored: bounded, without secrets, without what PostgreSQL refuses."""
        if len(text) <= limit:
            return self._hide(storable(text))
        # Twice the limit is looked at, so that a secret at the cut is seen with the words that give it away.
        head, tail = storable(text[: 2 * limit]), storable(text[-limit:])
        head = self._hide(head)[: limit * 2 // 3 - _CUT_MARK]
        tail = self._hide(_from_whole_word(tail))[-(limit // 3) :]
        return joined(head, tail, len(text) - len(head) - len(tail))

    def _hide(self, text: str) -> str:
        lower = text.lower()
        for words, pattern, replacement in _RULES:
            for word in words:
                if word in lower:
                    text = pattern.sub(replacement, text)
                    break
        if _CARD.search(text):
            text = _CARD.sub(_card, text)
        for pattern in self._patterns:
            text = pattern.sub(_HIDDEN, text)
        return text


def joined(head: str, tail: str, left_out: int) -> str:
    """Return the two ends of a text, saying how much is missing between them."""
    return f"{head}\n… {left_out:,} characters left out …\n{tail}"


def _from_whole_word(tail: str) -> str:
    # What the cut went through may be the rest of a secret whose name is gone.
    ended = _PRIVATE_KEY_END.search(tail)
    if ended and "-----BEGIN" not in tail[: ended.start()]:
        return tail[ended.end() :]
    found = re.search(r"\s", tail)
    return tail[found.end() :] if found else tail


def _card(found: re.Match[str]) -> str:
    digits = [int(digit) for digit in found[0] if digit.isdecimal()]
    doubled = [digit if place % 2 == 0 else sum(divmod(2 * digit, 10)) for place, digit in enumerate(reversed(digits))]
    return found[0] if sum(doubled) % 10 else _HIDDEN


def _compiled(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise InvalidSettings(f"the redaction pattern {pattern!r} is no regular expression: {error}") from error
