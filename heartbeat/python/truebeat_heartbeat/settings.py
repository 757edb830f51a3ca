"""Numbers that a person gives by the environment. A wrong one costs a line in the log, never the plugin."""
import os

from .hooks import log


def whole_number(name, usual, least, most):
    """The variable's value: `usual` where there is none or it is no whole number, the nearest bound where it is out of bounds."""
    text = (os.environ.get(name) or "").strip()
    if not text:
        return usual
    try:
        given = int(text)
    except ValueError:
        log.warning("truebeat: %s=%.40r is not a whole number (no unit, no point): %d is taken, as without it", name, text, usual)
        return usual
    taken = min(max(given, least), most)
    if taken != given:
        log.warning("truebeat: %s=%.40s is not within %d and %d: %d is taken", name, text, least, most, taken)
    return taken
