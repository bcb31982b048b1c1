"""Stop strings are found wherever the text is cut, and nothing of them is delivered."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.stop import StopMatcher, StopStrings

STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)
PIECES = st.lists(st.text(alphabet="abcd", max_size=6), max_size=12)


def run(stop_strings, pieces):
    """The delivered text, held text included, and the stop string that ended it."""
    matcher = StopMatcher(StopStrings(stop_strings))
    delivered = ""
    for piece in pieces:
        text, stop_string = matcher.push(piece)
        delivered += text
        if stop_string is not None:
            return delivered, stop_string
    return delivered + matcher.flush(), None


def naive(stop_strings, text, start=0):
    """The expected result for a text whose first `start` characters stop nothing."""
    for end in range(start + 1, len(text) + 1):
        found = [stop_string for stop_string in stop_strings if text[:end].endswith(stop_string)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(deadline=None)
@given(stop_strings=STOPS, pieces=PIECES)
def test_equals_a_search_of_the_whole_text(stop_strings, pieces):
    assert run(stop_strings, pieces) == naive(stop_strings, "".join(pieces))


@settings(deadline=None)
@given(stop_strings=STOPS, pieces=PIECES)
def test_holds_back_only_what_may_become_a_stop_string(stop_strings, pieces):
    matcher = StopMatcher(StopStrings(stop_strings))
    seen = delivered = ""
    for piece in pieces:
        text, stop_string = matcher.push(piece)
        if stop_string is not None:
            return
        seen, delivered = seen + piece, delivered + text
        held = seen[len(delivered) :]
        beginnings = [s[:n] for s in stop_strings for n in range(1, len(s)) if seen.endswith(s[:n])]
        assert held == max(beginnings, key=len, default="")


@given(text=st.text("ab", max_size=30), start=st.integers(0, 30), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_what_is_passed_over_stops_nothing_but_may_begin_a_match(text, start, cuts):
    stop_strings = ["aba", "bb", "aabaab"]
    start = min(start, len(text))
    matcher, out, found = StopMatcher(StopStrings(stop_strings)), "", None
    edges = sorted({0, len(text), start, *(min(cut, len(text)) for cut in cuts)})
    for first, last in itertools.pairwise(edges):
        if last <= start:
            out += matcher.pass_over(text[first:last])
            continue
        certain, found = matcher.push(text[first:last])
        out += certain
        if found is not None:
            break
    if found is None:
        out += matcher.flush()
    assert (out, found) == naive(stop_strings, text, start)
