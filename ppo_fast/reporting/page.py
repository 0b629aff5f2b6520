"""The frame of a report page: HTML skeleton and style, with nothing fetched from anywhere."""

from __future__ import annotations

import re
from html import escape

_STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1c2330; --ink-soft: #5b6575; --grid: #e2e6ec;
  --good: #12805c; --bad: #c0392b; --warn-page: #fff6e0; --warn-edge: #e0a100;
  --series-1: #2563c9; --series-2: #e0701a; --series-3: #2a9d6f; --series-4: #8a5cc9; }
@media (prefers-color-scheme: dark) { :root {
  --page: #12151b; --card: #1b2029; --ink: #e6eaf0; --ink-soft: #a0abbb; --grid: #323a47;
  --good: #4fc79a; --bad: #ff7b6b; --warn-page: #2f2813; --warn-edge: #d9a520;
  --series-1: #6ea8ff; --series-2: #ff9f57; --series-3: #5cd0a0; --series-4: #bb98f0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 1.05rem; font-weight: 600; margin: 0; color: var(--ink-soft); overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 48px 0 4px; }
h3 { font-size: 1rem; margin: 28px 0 8px; }
p { margin: 4px 0 12px; }
.soft, small { color: var(--ink-soft); font-size: .875rem; }
.card { background: var(--card); border: 1px solid var(--grid); border-radius: 12px; padding: 20px 24px; }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.good { color: var(--good); } .bad { color: var(--bad); }
.verdict { margin-top: 16px; border-left: 5px solid var(--ink-soft); }
.verdict.good { border-left-color: var(--good); } .verdict.bad { border-left-color: var(--bad); }
.verdict > * { color: var(--ink); }
.headline { font-size: 1.55rem; line-height: 1.3; font-weight: 650; letter-spacing: -.01em; margin: 0 0 16px; }
dl.findings { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: 6px 20px; margin: 0; }
dl.findings dt { font-weight: 600; max-width: 13rem; } dl.findings dd { margin: 0; }
dl.findings dt.good::after { content: " ▲"; font-size: .7em; }
dl.findings dt.bad::after { content: " ▼"; font-size: .7em; }
.warnings { margin-top: 16px; background: var(--warn-page); border-color: var(--warn-edge); }
.warnings ul { margin: 6px 0 0; padding-left: 1.2em; } .warnings li { margin: 4px 0; }
.verdict .soft { color: var(--ink-soft); margin: 14px 0 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; }
thead th { font-size: .8rem; color: var(--ink-soft); font-weight: 500; }
th, td { padding: 8px 14px 8px 0; border-bottom: 1px solid var(--grid); vertical-align: middle; }
tbody tr:last-child > * { border-bottom: 0; }
td.n, th.n { text-align: right; white-space: nowrap; }
tbody th small { display: block; font-weight: 400; }
.bar { width: 150px; height: 18px; display: block; }
.bar line { stroke: var(--ink-soft); stroke-width: 1; } .bar .range { stroke: var(--ink-soft); stroke-width: 3;
  stroke-linecap: round; } .bar circle { fill: var(--ink); }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; display: flex; flex-direction: column; padding: 16px 18px 6px; }
figure svg { width: 100%; height: auto; margin-top: auto; }
figcaption { margin-bottom: 8px; } figcaption b { margin-right: 10px; }
.key { font-size: .82rem; white-space: nowrap; margin-right: 12px; color: var(--ink-soft); }
.key i { display: inline-block; width: 18px; height: 0; border-top: 3px solid; vertical-align: middle;
  margin-right: 5px; }
.key i.dashed { border-top-style: dotted; }
figcaption small { display: block; line-height: 1.35; margin-top: 2px; }
.reply { margin: 12px 0; padding: 0; overflow: hidden; }
.reply .prompt { padding: 12px 20px; border-bottom: 1px solid var(--grid); }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr)); }
.sides > div { padding: 12px 20px; } .sides > div + div { border-left: 1px solid var(--grid); }
.said { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 22em; overflow-y: auto; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(320px, 100%), 1fr)); gap: 16px; }
.facts h3 { margin: 0 0 4px; } .facts table { font-size: .875rem; table-layout: fixed; }
.facts th { font-weight: 400; color: var(--ink-soft); width: 42%; } .facts th, .facts td { padding: 4px 10px 4px 0;
  vertical-align: top; overflow-wrap: anywhere; }
pre { overflow-x: auto; font: .85rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: 12px 0 0; }
summary { cursor: pointer; font-weight: 600; }
footer { margin-top: 40px; }
@media print { body { background: #fff; } .card, figure { break-inside: avoid; } .said { max-height: none; } }
"""


def page(title: str, body: str) -> str:
    """A whole HTML document."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        "</body>\n</html>\n"
    )


def prose(text: str) -> str:
    """Escaped text in which `backticks` mark code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
