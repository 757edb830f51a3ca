#!/usr/bin/env python3
"""Renders chats as `transformers` does: jinja2 set up as its `_cached_compile_jinja_template` sets it up, but for the tracker of the
assistant's tokens, whose tags print nothing, and for a clock that stands still.

Standard input: {"templates": {name: text}, "chats": {name: variables}, "now": "2026-03-09T08:05:00"}. Standard output: for every name of
a template, for every name of a chat, {"text": …}, {"refused": …} by the template itself, or {"failed": …}.
"""

import datetime
import json
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


class Refused(jinja2.exceptions.TemplateError):
    pass


def environment(now):
    def raise_exception(message):
        raise Refused(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = now.strftime
    return env


def rendered(template, chat):
    try:
        return {"text": template.render(**chat)}
    except Refused as error:
        return {"refused": str(error)}
    except (jinja2.exceptions.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def main():
    asked = json.load(sys.stdin)
    env = environment(datetime.datetime.fromisoformat(asked["now"]))
    templates = {name: env.from_string(text) for name, text in asked["templates"].items()}
    told = {name: {chat: rendered(template, words) for chat, words in asked["chats"].items()} for name, template in templates.items()}
    json.dump(told, sys.stdout)


main()
