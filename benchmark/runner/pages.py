"""Two forms of a report: Markdown with the figures beside it, and one HTML file that needs no other.

A report is a list of (kind, content): title, heading, text and code are strings, a table is its header and its rows, a
figure is its name. In texts and tables `code` and **bold** are marked as in Markdown.
"""

import base64
import html
import re

CAPTIONS = {
    "aggregate": "Estimates over all environments and their 95 % intervals.",
    "improvement": "Probability that a run of the one beats a run of the other on the same environment.",
    "profile": "Performance profiles: the share of runs better than a score.",
    "efficiency": "Interquartile mean over steps, and over the time of a run up to the end of the first.",
    "choices": "Of each value: the percentile of the configurations with it, its binomial interval (hatched: not "
    "enough data for its upper end); and its share among the best 5 % (grey: 20 %), the line being that of chance.",
    "learning": "Mean of all configurations over steps, and of the best of them.",
    "spread": "Distribution of the configurations' scores between the random policy (0) and the best (1).",
    "curves": "Each run (thin), the mean where all have a value (thick) and its 95 % interval.",
}


def plain(text):
    """Markdown in which names are no HTML: outside `code`, which shows them as they are."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if part.startswith("`") else html.escape(part, quote=False) for part in parts)


def markdown(content):
    forms = {"title": "# {}", "heading": "## {}", "text": "{}", "code": "```bash\n{}\n```"}
    lines = []
    for kind, what in content:
        if kind == "table":
            header, rows = what
            rows = header, ["---"] * len(header), *rows
            cells = [[plain(cell).replace("|", "\\|") for cell in row] for row in rows]
            lines += [f"| {' | '.join(row)} |" for row in cells]
        elif kind == "figure":
            picture = f"![{CAPTIONS[what]}](figures/{what}.png)"
            lines += [picture, "", f"*{CAPTIONS[what]}* [SVG](figures/{what}.svg)"]
        else:
            lines.append(forms[kind].format(what if kind == "code" else plain(what)))
        lines.append("")
    return "\n".join(lines)


STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --line: #d8d8d8; --soft: #f5f5f5 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e4; --paper: #17181a; --line: #3c3e42; --soft: #222428 } }
body { margin: 0; display: flex; justify-content: center; gap: 2rem; color: var(--ink); background: var(--paper);
  font: 16px/1.55 system-ui, sans-serif }
nav { position: sticky; top: 0; align-self: flex-start; flex: 0 0 11rem; max-height: 100vh; overflow: auto;
  padding: 2rem 0 1rem 1rem; font-size: .9rem }
nav a { display: block; color: inherit; text-decoration: none; padding: .2rem 0 }
nav a:hover { text-decoration: underline }
main { flex: 1 1 auto; min-width: 0; max-width: 60rem; padding: 1rem 1rem 4rem }
p { max-width: 46rem }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .7rem; text-align: left; vertical-align: top }
code, pre { background: var(--soft); border-radius: 4px; font-size: .85em; padding: .1em .3em }
pre { padding: .8rem; overflow-x: auto }
.wide { overflow-x: auto; margin: 1rem 0 }
figure { margin: 1.5rem 0 }
figcaption { font-size: .85rem; opacity: .8 }
img { width: 100%; background: #fff; border-radius: 6px }
@media (max-width: 60rem) { body { display: block } nav { position: static } nav a { display: inline-block;
  margin-right: 1rem } }
"""


def page(content, figures):
    """figures: the folder of the SVG files, which become a part of the page."""
    body, links, title = [], [], ""
    for kind, what in content:
        if kind == "title":
            title = html.escape(what)
            body.append(f"<h1>{title}</h1>")
        elif kind == "heading":
            name = what.lower().replace(" ", "-")
            links.append(f'<a href="#{name}">{html.escape(what)}</a>')
            body.append(f'<h2 id="{name}">{html.escape(what)}</h2>')
        elif kind == "table":
            header, rows = what
            rows = "".join(f"<tr>{cells(row, 'td')}</tr>\n" for row in rows)
            head = f"<thead><tr>{cells(header, 'th')}</tr></thead>"
            body.append(f'<div class="wide"><table>{head}<tbody>\n{rows}</tbody></table></div>')
        elif kind == "figure":
            data = base64.b64encode((figures / f"{what}.svg").read_bytes()).decode()
            picture = f'<img alt="{CAPTIONS[what]}" src="data:image/svg+xml;base64,{data}">'
            body.append(f"<figure>{picture}<figcaption>{CAPTIONS[what]}</figcaption></figure>")
        else:
            body.append(f"<pre>{html.escape(what)}</pre>" if kind == "code" else f"<p>{marked(what)}</p>")
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f"<head>{meta}<title>{title}</title><style>{STYLE}</style></head>"
    links, body = "\n".join(links), "\n".join(body)
    return f"""<!DOCTYPE html>
<html lang="en">{head}
<body><nav>{links}</nav>
<main>{body}</main></body></html>
"""


def cells(row, tag):
    return "".join(f"<{tag}>{marked(cell)}</{tag}>" for cell in row)


def marked(text):
    form = {True: "<code>{}</code>", False: "<strong>{}</strong>"}
    pattern = r"`([^`]+)`|\*\*(.+?)\*\*"
    return re.sub(pattern, lambda m: form[m[1] is not None].format(m[1] or m[2]), html.escape(text))
