"""How a report looks: colours for light and dark, and the style sheet.

Lines are told apart by colour-blind people (Okabe, Ito 2008, darkened or lightened for the background) and
without colours, by their dashes. A test measures the contrast of every pair below (WCAG 2.2: text 4.5,
graphics 3).
"""

from __future__ import annotations

LIGHT = {
    "page": "#f6f5f1",
    "card": "#ffffff",
    "ink": "#1c2127",
    "quiet": "#596270",
    "rule": "#dddbd3",
    "grid": "#eceae3",
    "a": "#0067a5",
    "b": "#b34a00",
    "c": "#00734f",
    "d": "#8a3f7d",
    "pill": "#e3eef6",
    "m0": "#ffffff",
    "m1": "#dcebf5",
    "m2": "#b5d5ea",
    "m3": "#7fb5d8",
    "m4": "#2b77ad",
    "m5": "#0b4f80",
    "n0": "#1c2127",
    "n1": "#1c2127",
    "n2": "#1c2127",
    "n3": "#10161c",
    "n4": "#ffffff",
    "n5": "#ffffff",
}
DARK = {
    "page": "#121518",
    "card": "#1a1e23",
    "ink": "#e9ebee",
    "quiet": "#a2abb7",
    "rule": "#363d46",
    "grid": "#272d34",
    "a": "#62b6ee",
    "b": "#f0a35c",
    "c": "#3ecb9b",
    "d": "#dd9bd0",
    "pill": "#1d3242",
    "m0": "#1a1e23",
    "m1": "#1b3347",
    "m2": "#1f4c6d",
    "m3": "#2a6a97",
    "m4": "#62b6ee",
    "m5": "#a9dafa",
    "n0": "#e9ebee",
    "n1": "#e9ebee",
    "n2": "#e9ebee",
    "n3": "#ffffff",
    "n4": "#10161c",
    "n5": "#10161c",
}
TEXTS = [(ink, on) for ink in ("ink", "quiet", "a", "b", "c", "d") for on in ("page", "card")]
TEXTS += [("a", "pill"), ("ink", "pill"), *((f"n{level}", f"m{level}") for level in range(6))]


def variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


SHEET = (
    f":root{{color-scheme:light dark;{variables(LIGHT)}}}\n@media"
    f" (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}\n"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
  font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;
  -webkit-text-size-adjust:100%;overflow-wrap:anywhere}
main{max-width:1080px;margin:0 auto;padding:28px 16px 56px}
h1{font-size:clamp(1.45rem,1.1rem + 1.6vw,2.1rem);line-height:1.15;letter-spacing:-.02em;margin:0 0 6px}
h2{font-size:1.15rem;letter-spacing:-.01em;margin:0 0 2px}
h3{font-size:.95rem;margin:0}
p{margin:0;max-width:72ch}
.quiet{color:var(--quiet);font-size:.875rem}
.pill{display:inline-block;background:var(--pill);color:var(--ink);border-radius:99px;padding:1px 11px;
  font-size:.8125rem;font-weight:600;margin-bottom:10px}
header{margin-bottom:22px}
section{background:var(--card);border:1px solid var(--rule);border-radius:12px;
  padding:18px 20px;margin-top:16px}
section>.quiet{margin-bottom:12px}
.heroes{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,190px),1fr));gap:16px;margin-top:18px}
.hero{border-left:3px solid var(--own);padding-left:13px}
.hero b{display:block;font-size:1.9rem;line-height:1.15;letter-spacing:-.02em;font-weight:650;
  font-variant-numeric:tabular-nums}
.hero span{color:var(--quiet);font-size:.875rem}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--quiet);font-size:.875rem;padding-bottom:6px}
th,td{padding:6px 10px 6px 0;border-bottom:1px solid var(--grid);text-align:left;font-weight:400;
  vertical-align:middle}
thead th{color:var(--quiet);font-size:.8125rem;border-color:var(--rule);vertical-align:bottom}
tr:last-child>*{border-bottom:0}
tr.gain>*{font-weight:650}
.n{text-align:right;white-space:nowrap;width:1%;padding-left:14px}
td:last-child,th:last-child{padding-right:0}
.bar{width:40%;padding-left:14px}
.keys{display:flex;flex-wrap:wrap;gap:2px 18px}
.bar svg,.times svg{display:block;width:100%;height:18px;overflow:visible}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:22px 28px}
figure{margin:0}
figcaption{display:flex;flex-wrap:wrap;align-items:baseline;gap:2px 14px;margin-bottom:4px}
.key{font-size:.8125rem;color:var(--quiet);white-space:nowrap}
.key svg{width:22px;height:8px;margin-right:5px;vertical-align:middle;overflow:visible}
figure>svg{display:block;width:100%;height:auto}
svg text{font-size:12.5px;fill:var(--quiet);font-variant-numeric:tabular-nums}
.end{text-anchor:end}.middle{text-anchor:middle}
.grid{stroke:var(--grid)}.hair{stroke:var(--quiet);stroke-width:.7}
.curve{fill:none;stroke-width:1.9;stroke-linejoin:round;stroke-linecap:round}
.curve.faint{stroke-width:.8;opacity:.45}
.a{--own:var(--a)}.b{--own:var(--b)}.c{--own:var(--c)}.d{--own:var(--d)}
.curve,.rod{stroke:var(--own)}.dot,.fill{fill:var(--own)}
.rod{stroke-width:2.5;stroke-linecap:round}
.curve.b{stroke-dasharray:5 4}.curve.c{stroke-dasharray:1.5 4.5;stroke-width:2.6}
.word-spike{color:var(--b)}
text .word{fill:var(--own)}
.hollow{fill:var(--card);stroke:var(--own);stroke-width:2}
.spike{fill:var(--b)}.tick{stroke-width:1.6;stroke:var(--d);fill:none}.tick.a{stroke:var(--ink)}
.area{fill:transparent}.tip{visibility:hidden;pointer-events:none}.strip:hover .tip{visibility:visible}
.times{display:grid;grid-template-columns:max-content 1fr;gap:6px 14px;align-items:center;
  font-size:.875rem;margin:10px 0}
.scroll{overflow-x:auto}
.confusion{width:auto}
.confusion td{min-width:2.4em;text-align:center;padding:6px;border:2px solid var(--card);border-radius:6px}
.confusion thead th{text-align:center;padding:4px 6px;border:0}
.confusion tbody th{border:0;padding-right:12px;min-width:6em}
.confusion .right{font-weight:700}
"""
    + "".join(f".m{level}{{background:var(--m{level});color:var(--n{level})}}" for level in range(6))
    + """
details{margin-top:12px}
summary{cursor:pointer;font-size:.9rem;font-weight:600;padding:4px 0}
summary:focus-visible,.scroll:focus-visible{outline:2px solid var(--a);outline-offset:2px;border-radius:4px}
code{font:.8125rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.settings td{word-break:break-word}
footer{margin-top:22px}
@media (min-width:700px){svg text{font-size:9.6px}}
@media (max-width:560px){
  main{padding:20px 12px 40px}section{padding:14px}
  .stack thead .bar{display:none}
  .stack tr{display:grid;grid-template-columns:1fr auto auto;column-gap:14px;
    border-bottom:1px solid var(--grid);
    padding:6px 0}
  .stack tr:last-child{border-bottom:0}
  .stack th,.stack td{border:0;padding:2px 0}
  .stack.wide tbody th,.stack.wide thead th:first-child,.stack .bar{grid-column:1/-1;width:auto}
  .stack.wide tr{grid-template-columns:auto 1fr}
}
@media print{section{break-inside:avoid}}
"""
)
