"""The style sheet of the html report: light and dark, from a phone's width up, with nothing from elsewhere.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; nothing is told by colour alone.
"""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --faint: #57606a; --line: #d0d7de; --card: #f6f8fa;
  --heat: 0,114,178; --pass: #00694e; --warn: #8f5a00; --fail: #b03a00; --error: #84335f; --c0: #0072b2; --c1: #b84f00;
  --c2: #00785a; --c3: #a4447c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --faint: #9da7b3; --line: #30363d;
  --card: #161b22; --heat: 86,180,233; --pass: #3ddbaa; --warn: #f0b429; --fail: #ff8552; --error: #e39ac3;
  --c0: #56b4e9; --c1: #ff8c42; --c2: #2fd6a3; --c3: #dd9ac2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1340px; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: .2rem 0 .8rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.verdict { border: 2px solid currentColor; border-radius: .5rem; padding: .6rem .9rem; font-weight: 700; }
.PASS { color: var(--pass); } .WARN, .INCONCLUSIVE { color: var(--warn); } .FAIL { color: var(--fail); }
.ERROR { color: var(--error); } .SKIP { color: var(--faint); }
.verdict p { color: var(--ink); font-weight: 400; margin: .3rem 0 0; }
.finding { border-left: 4px solid currentColor; background: var(--card); padding: .5rem .8rem; margin: .8rem 0; }
.finding dl, .finding span { color: var(--ink); } .finding code { font-size: .9em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; margin: .4rem 0 0; font-size: .9rem; }
dt { color: var(--faint); } dd { margin: 0; min-width: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .55rem; border: 1px solid var(--line); text-align: left; overflow-wrap: normal; }
th { background: var(--card); font-weight: 600; } td.n { text-align: right; white-space: nowrap; }
td.h { text-align: right; background: rgba(var(--heat), calc(var(--s) * .55)); white-space: nowrap; }
td.low { outline: 2px dashed var(--fail); outline-offset: -2px; font-weight: 700; }
td b { color: inherit; } td.own { color: var(--faint); text-align: center; }
summary { cursor: pointer; color: var(--faint); font-size: .9rem; margin: .3rem 0; }
.hit { fill: transparent; stroke: none; }
.note { color: var(--faint); font-size: .85rem; margin: .3rem 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: .5rem; padding: .6rem; max-width: 620px; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .3rem; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--faint); font: 14px system-ui, sans-serif; }
.grid { stroke: var(--line); stroke-width: 1; } .curve { fill: none; stroke-width: 2.5; }
.limit { fill: none; stroke: var(--ink); stroke-width: 2; stroke-dasharray: 9 4; }
.expected { fill: none; stroke: var(--faint); stroke-width: 2.5; stroke-dasharray: 2 4; }
.k0 { stroke: var(--c0); } .k1 { stroke: var(--c1); stroke-dasharray: 12 3; } .k2 { stroke: var(--c2); }
.k3 { stroke: var(--c3); stroke-dasharray: 6 3 2 3; } .m { fill: var(--paper); stroke-width: 2; }
.t { fill: var(--paper); stroke: currentColor; stroke-width: 2; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .85rem; padding: 0; margin: .3rem 0 0; }
.legend li { list-style: none; display: flex; align-items: center; gap: .4rem; }
.legend svg { width: 34px; height: 12px; flex: none; }
.box, .gpu, .nic { fill: var(--card); stroke: var(--line); stroke-width: 1.5; } .gpu { fill: var(--paper); }
.gpu { stroke: var(--faint); } rect.odd { stroke: currentColor; stroke-width: 3; }
svg .b { fill: var(--ink); font-weight: 600; font-size: 13px; }
svg .d { font-weight: 400; font-size: 11px; fill: var(--faint); }
svg .f { font-size: 11px; } svg .tag { fill: currentColor; font-weight: 700; font-size: 13px; }
svg .tag { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; stroke-linejoin: round; }
.w { fill: none; stroke: var(--line); stroke-width: 2; } .s3 { stroke: var(--c2); stroke-width: 3; }
.s2 { stroke: var(--c0); stroke-width: 3; } .s1 { stroke: var(--warn); stroke-width: 3.5; stroke-dasharray: 7 3; }
.s0 { stroke: var(--fail); stroke-width: 4; stroke-dasharray: 3 3; } .w.odd { stroke-width: 4.5; }
figure.timeline { max-width: none; } rect.compute { fill: var(--c0); } rect.hidden { fill: var(--c2); }
rect.exposed { fill: var(--fail); } rect.bubble { fill: var(--line); }
footer { color: var(--faint); font-size: .8rem; margin: 2.5rem 0 1rem; }
"""
"""CSS of the whole page."""
