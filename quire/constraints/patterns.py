"""Regular expressions of JSON schemas, rewritten so that the engine enforces them.

A pattern describes the text of a string, and the engine derives from it how that text is written in JSON: character
by character, with escapes. llguidance 1.9.1 does that for sets of characters, and allows too much for one kind: a set
of all control characters, with or without the line feed, may also be written as `\\"` and `\\\\`, even if it lacks
these two characters. Sets arise from classes, and from alternatives, which the engine unites.

So no set here has U+0000 or U+0001 unless it also has the quotation mark and the backslash: `.`, `\\D`, `\\S` and `\\W`
have all four, and the two control characters are removed from other sets. Unions and intersections preserve that.
"""

import re

# The items of a pattern as the engine reads them; the groups name the items that are changed or refused.
_ITEM = re.compile(
    r"""(?P<sound>\[\[\^?(?:\\.|[^\\\[\]])*\]--\[\\x00\\x01\]\]|\[\\[pP](?:\{[^}]*\}|.)--\[\\x00\\x01\]\])
    |(?P<property>\\[pP](?:\{[^}]*\}|.))
    |\\(?:[xuU]\{(?P<code>[^}]*)\}|x(?P<x>..)|u(?P<u>.{4})|U(?P<U>.{8}))
    |\\(?P<escaped>.)
    |(?P<named>\(\?P?<(?![=!])[^>]*>)
    |(?P<look>\(\?<?[=!])
    |(?P<flags>\(\?[a-zA-Z-]*[:)])
    |(?P<repeated>(?:[*+?]|\{[0-9]+,?[0-9]*\})[*+])
    |\[(?P<negated>\^?+)(?P<first>\]?+)(?P<class>(?>\\(?:[xuUpP]\{[^}]*\}|.)|[^\]\\])*+)\]
    |(?P<open>\[)
    |.""",
    re.DOTALL | re.VERBOSE,
)
_IN_CLASS = re.compile(r"\\(?:[xuUpP]\{[^}]*\}|.)|\[:|--|.", re.DOTALL)
# Word boundaries and back references.
_REFUSED_ESCAPES = frozenset("bBk123456789")
_SHORT_ESCAPES = frozenset("dwstnrfv")
CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON can only write as codes (\\uXXXX)."""
_CONTROL_CODE = re.compile(
    r"\\(?:[xuU]\{0*(?:[01]?[0-9a-fA-F]|7[fF])\}|(?:x|u00|U000000)(?:[01][0-9a-fA-F]|7[fF])|a|v)"
)
_SET = re.compile(r"\[(?:\^|(?:\\.|[^\\\]-])+-)(?:\\.|[^\\\]])*\]")
_TAKEN_AWAY = "[[{}]--[\\x00\\x01]]"


def sound_pattern(pattern: str) -> str:
    """An equal regular expression that the engine enforces, except that most of its sets lack U+0000 and U+0001.

    Raises:
        ValueError: the pattern has a part that the engine does not enforce; the text names it.
    """
    parts: list[str] = []
    single = set[str]()
    for found in _ITEM.finditer(pattern):
        part = found.group()
        if found["look"] or (found["escaped"] is not None and found["escaped"] in _REFUSED_ESCAPES):
            raise ValueError("look-around, \\b and back references are not enforced")
        if found["repeated"]:
            raise ValueError(f"the repetition {part} is not enforced, which regular expressions read in several ways")
        if found["flags"] and "x" in found["flags"]:
            raise ValueError("the flag x is not enforced; write the pattern without white space and comments")
        if found["open"]:
            raise ValueError("a class does not end; write \\[ for the character")
        if found["sound"]:
            pass
        elif found["named"]:
            # The engine gives a meaning to a name.
            part = "("
        elif found["property"]:
            part = _TAKEN_AWAY.format(part)
        elif found["class"] is not None:
            part = _sound_class(found["negated"], found["first"], found["class"])
        else:
            code = found["code"] or found["x"] or found["u"] or found["U"] or ""
            single.add(chr(int(code, 16)) if re.fullmatch("0+1?", code) else part)
        parts.append(part)
    if {"\0", "\x01"} <= single:
        raise ValueError("a pattern with both U+0000 and U+0001 is not enforced; write them as a class")
    return "".join(parts)


def names_control(pattern: str) -> bool:
    """Whether a pattern names control characters, other than by ranges or exclusions with further characters."""
    named = _SET.sub("", pattern.replace(_TAKEN_AWAY[4:], "]")).replace("\\\\", "")
    return CONTROL.search(named) is not None or _CONTROL_CODE.search(named) is not None


def _sound_class(negated: str, first: str, content: str) -> str:
    """A class of characters. `first`: a bracket that is one of them because it stands before all others."""
    items = _IN_CLASS.findall(content)
    for item in items:
        if item in ("[:", "--"):
            raise ValueError(f"{item} in a class is not enforced; write \\{item}, or the characters that are meant")
    # In the engine these three begin a class within the class, and operations of classes.
    escaped = "".join(f"\\{item}" if item in "[&~" else item for item in items)
    inner = f"{negated}\\]{escaped}" if first else negated + escaped
    is_simple = all(
        item >= " " if item[0] != "\\" else (item[1] in _SHORT_ESCAPES or not item[1].isalnum()) for item in items
    )
    has_marks = any(item[0] == "\\" and item[1] in "DSW" for item in items)
    return f"[{inner}]" if not negated and (is_simple or has_marks) else _TAKEN_AWAY.format(inner)
