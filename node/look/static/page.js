// Keeps the picture up to date: asks for what is new, draws what changed.
"use strict";
const token = location.hash.slice(1);
const data = { changes: 0, rounds: null, losses: {}, lines: [], doc: null };
let last = 300, chosen = -1, drawn = null, charts = {};
async function ask(path) {
  const answer = await fetch(path, { headers: { "X-Atoll-Token": token }, cache: "no-store" });
  if (!answer.ok) throw new Error(answer.status === 403 ? "the address lacks its token: open it as atoll ui printed it" : `status ${answer.status}`);
  return answer.json();
}
function merge(doc) {
  if (!data.rounds || doc.rounds.first < data.rounds.first) { data.rounds = doc.rounds; data.end = doc.rounds.first + doc.rounds.round.length; }
  else {
    for (const [key, values] of Object.entries(doc.rounds)) if (Array.isArray(values)) for (const value of values) data.rounds[key].push(value);
    data.end += doc.rounds.round.length;
    const over = data.rounds.round.length - 10000;
    if (over > 0) for (const values of Object.values(data.rounds)) if (Array.isArray(values)) values.splice(0, over);
  }
  data.losses = doc.losses;
  for (const row of doc.lines.rows) data.lines.push(row);
  data.lineEnd = doc.lines.first + doc.lines.rows.length;
  data.lines.splice(0, Math.max(0, data.lines.length - 500));
  data.changes = doc.changes; data.doc = doc;
}
function head(doc) {
  const name = $("name"), state = $("state");
  name.replaceChildren(doc.run.name || "a run", el("small", doc.run.id.slice(0, 8)));
  document.title = `${doc.quick.round}${doc.run.rounds ? "/" + doc.run.rounds : ""} ${doc.run.name} · atoll`;
  if (state.textContent !== doc.state) state.textContent = doc.state;
  state.className = /^(training|finished|as recorded)/.test(doc.state) ? "state" : "state warn";
  const bar = $("progress");
  bar.parentElement.hidden = !doc.run.rounds;
  bar.max = doc.run.rounds || 1; bar.value = Math.min(bar.max, doc.quick.round);
  const rows = doc.verdicts.map((told) => ["verdict", `${told.code} ${told.message}`, [told.why, told.hint].filter(Boolean).join("  ")]);
  if (doc.waits) rows.unshift(["verdict waits", doc.waits, ""]);
  const text = JSON.stringify(rows);
  if ($("wrong").dataset.text !== text) {
    $("wrong").dataset.text = text;
    $("wrong").replaceChildren(...rows.map(([cls, what, more]) => { const box = el("div", null, cls); box.append(el("p", what)); if (more) box.append(el("p", more)); return box; }));
  }
}
function figures(doc) {
  const q = doc.quick;
  const ddp = q.ddp_times ? `DDP: ${bytes(q.ddp_bytes)}, ${q.ddp_times.toFixed(0)} times as much` : "";
  const rows = [
    ["Round", doc.run.rounds ? `${q.round} / ${doc.run.rounds}` : String(q.round), "", "round"],
    ["Members", `${q.reachable} of ${q.members}`, "reachable", "members"],
    ["A round takes", span(q.period_s), q.age_s !== null && doc.script ? `the last ${span(q.age_s)} ago` : "", "period"],
    ["Training", percent(q.training_share), doc.run.overlap === "none" ? "of the time; the rest waits" : "goes on during rounds", "share"],
    ["Sent", bytes(q.bytes_sent), ddp || `${bytes(q.bytes_received)} received`, "sent"],
    ["Loss", q.loss === null ? "–" : q.loss.toPrecision(4), "of this node's script", "loss"],
  ];
  if (doc.rate) {
    const own = doc.metrics.tokens_s, unit = doc.rate.unit;
    rows.push([`${unit[0].toUpperCase()}${unit.slice(1)} a second`, pace(doc.rate.all), `${unit === "tokens" ? "learned, " : ""}of ${doc.rate.members} members` + (Number.isFinite(own) ? `; this script reads ${pace(own)}` : ""), "rate"]);
  }
  if (q.gain) rows.push(["Worth", `${q.gain.split(" ")[0]} ×`, q.gain, "gain"]);
  if (q.samples !== null) rows.push(["Samples", count(q.samples), "of all members", "samples"]);
  for (const [label, words] of q.figures) rows.push([label[0].toUpperCase() + label.slice(1), words.split(", ")[0], words.split(", ")[1] || "", label]);
  if (q.memory_bytes) rows.push(["Memory", bytes(q.memory_bytes), "of the node", "memory"]);
  const held = doc.metrics.held_out, own = doc.metrics.held_out_own;
  if (Number.isFinite(held) && Number.isFinite(own)) rows.push(["Held out", held.toPrecision(4), `own weights before it ${own.toPrecision(4)}`, "held-out"]);
  if (doc.evaluation) rows.push(["Held-out loss", doc.evaluation.held_out === null ? "no number" : doc.evaluation.held_out.toPrecision(4), `after round ${doc.evaluation.round}, ${count(doc.evaluation.tokens)} tokens`, "evaluation"]);
  for (const [name, value] of Object.entries(doc.mean)) rows.push([name, value === null ? "–" : value.toPrecision(4), "mean of all sites", "mean"]);
  $("figures").replaceChildren(...rows.map(([what, value, more, key]) => { const box = el("div"), dd = el("dd", value); dd.dataset.key = key; if (more) dd.append(el("small", more)); box.append(el("dt", what), dd); return box; }));
}
const LANES = 64;  // members whose rounds are drawn
function seenMembers(doc) {
  const seen = doc.peers.filter((p) => p.member || p.rounds);
  return seen.sort((a, b) => (b.you - a.you) || (b.member - a.member) || a.number - b.number);
}
function drawRounds() {
  const doc = data.doc, rounds = data.rounds, width = $("timeline-box").clientWidth;
  const first = last ? Math.max(0, rounds.round.length - last) : 0;
  const seen = seenMembers(doc);
  drawn = timeline($("timeline"), width, rounds, first, seen.slice(0, LANES), chosen);
  $("lanes").textContent = seen.length > LANES ? `${LANES} of ${seen.length} members` : "";
  const kinds = [["did", "contributed"], ["slow", "and was the slowest"], ["not", "did not"], ["lost", "lost"]].filter(([kind]) => kind !== "slow" || !doc.run.hidden.includes("timings"));
  if (!$("legend").children.length) $("legend").replaceChildren(...kinds.map(([cls, text]) => { const box = el("span"); box.append(el("i", "", cls), text); return box; }));
}
const nameOf = (number) => (data.doc.peers[number] || { name: "" }).name;
function roundWords(i) {
  const r = data.rounds, who = data.doc.peers.filter((p) => bit(r.who[i], p.number)).length;
  const lost = data.doc.peers.filter((p) => bit(r.lost[i], p.number)).map((p) => p.name);
  const slow = r.slowest.length && r.slowest[i] !== null ? `; slowest ${nameOf(r.slowest[i])} in ${r.phase[i]}, ${span(r.behind_s[i])} behind` : "";
  return `Round ${r.round[i]}, ${clock(r.at[i])}: ${who} of ${r.members[i]} contributed` + (r.samples.length ? `, ${count(r.samples[i])} samples` : "") + (r.period_s[i] ? `, ${span(r.period_s[i])}` : "") + slow + (lost.length ? `; lost ${lost.join(", ")}` : "");
}
function choose(i) {
  if (!data.rounds || !data.rounds.round.length) return;
  chosen = Math.max(drawn ? drawn.first : 0, Math.min(data.rounds.round.length - 1, i));
  $("round-now").textContent = roundWords(chosen); drawRounds();
}
// The head stays while it says the same, so that whoever stands on it with the keyboard is not moved.
function table(node, header, rows, keys = [], head = (text) => text) {
  const top = el("tr"), body = el("tbody"), same = node.tHead && node.dataset.head === header.join();
  node.dataset.head = header.join();
  if (!same) header.forEach((text, i) => { const th = el("th", null, keys[i]); th.scope = "col"; th.append(head(text, i)); top.append(th); });
  for (const [cls, cells] of rows) { const tr = el("tr", null, cls); cells.forEach((cell, i) => { const td = el("td", cell instanceof Node ? null : cell, keys[i]); if (cell instanceof Node) td.append(cell); tr.append(td); }); body.append(tr); }
  if (same) { node.tBodies[0].replaceWith(body); return; }
  const thead = el("thead"); thead.append(top); node.replaceChildren(thead, body);
}
// By which column members stand, and whether the largest comes first; by none: this node, members, who is gone.
let sorted = { by: "", down: false };
function sortBy(by) {
  sorted = { by, down: sorted.by === by ? !sorted.down : !["Member", "State", "Path"].includes(by) };
  members(data.doc);
}
// Name, the value that it is sorted by, how a cell shows it, and what must not be hidden for it.
const COLUMNS = (doc) => [
  ["Member", (p) => p.name || "", (name, p) => { const found = el("span", name + (p.you ? " (you)" : "")); found.append(el("span", "…" + p.id.slice(-8), "id")); return found; }],
  ["State", (p) => p.state || "", (state) => el("span", state, "pill " + state)],
  ["Path", (p) => (p.you ? "here" : p.path_text || p.path || "–"), (path, p) => path + (p.why ? `: ${p.why}` : "")],
  ["Round trip", (p) => p.rtt_ms, (ms) => (ms === null ? "–" : `${ms.toFixed(0)} ms`)],
  ["Rounds", (p) => p.rounds],
  ...(doc.rate ? [[`${doc.rate.unit[0].toUpperCase()}${doc.rate.unit.slice(1)}/s`, (p) => p.rate, pace]] : []),
  [doc.run.unit[0].toUpperCase() + doc.run.unit.slice(1), (p) => p.samples, count, "samples"],
  ["Slowest in", (p) => p.slowest, String, "timings"],
  ["Sent to", (p) => p.sent, bytes], ["Received", (p) => p.received, bytes],
];
function members(doc) {
  const shown = COLUMNS(doc).filter(([, , , needs]) => !doc.run.hidden.includes(needs)), rows = seenMembers(doc);
  const by = shown.find(([name]) => name === sorted.by);
  if (by) {
    const value = by[1], sign = sorted.down ? -1 : 1, known = (v) => v !== null && v !== undefined;
    rows.sort((a, b) => known(value(b)) - known(value(a)) || sign * (typeof value(a) === "string" ? value(a).localeCompare(value(b)) : value(a) - value(b)) || a.number - b.number);
  }
  table($("members"), shown.map(([name]) => name), rows.map((p) => [p.member ? "" : "gone", shown.map(([, value, cell]) => (cell || String)(value(p), p))]), shown.map(([, value]) => (typeof value(rows[0] || doc.peers[0] || {}) === "string" ? "" : "n")), (name) => {
    const button = el("button", name); button.type = "button"; button.addEventListener("click", () => sortBy(name));
    return button;
  });
  [...$("members").tHead.rows[0].cells].forEach((th) => th.setAttribute("aria-sort", th.textContent !== sorted.by ? "none" : sorted.down ? "descending" : "ascending"));
}
function chart(key, series, rows, unit, more = {}) {
  const box = $(key), width = box.clientWidth, grid = { stroke: colour("line"), width: 1 }, font = "11px system-ui, sans-serif";
  if (charts[key]) charts[key].destroy();
  box.replaceChildren();
  const axis = { stroke: colour("soft"), grid, ticks: grid, font, size: 46 };
  charts[key] = new uPlot({ ...more, width, height: 230, legend: { show: false }, cursor: { y: false, points: { size: 7 } }, scales: { x: { time: false } }, axes: [{ ...axis, size: 30 }, { ...axis, values: (u, v) => v.map((x) => (x === null ? "" : x.toPrecision(3).replace(/\.?0+$/, "") + unit)) }], series: [{}, ...series] }, rows, box);
}
const loss = (v) => (v === null || v === undefined ? "no number" : v.toPrecision(4));
const PALETTE = ["lagoon", "coral", "leaf", "sun", "soft"];
// Lines of a chart of losses: of each member that told any, and of held-out data.
function lossLines(doc) {
  const names = Object.keys(doc.losses), dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const hue = (s) => (names.length <= PALETTE.length ? colour(PALETTE[s]) : `hsl(${Math.round((360 * s) / names.length)} 62% ${dark ? 66 : 38}%)`);
  const found = names.map((n, s) => ({ name: nameOf(Number(n)), told: doc.losses[n], stroke: hue(s) }));
  if (doc.held_out.rounds.length) found.push({ name: "held out", told: doc.held_out, stroke: colour("ink"), dash: [5, 4] });
  return found;
}
let lit = "";  // the line that is pointed at in the legend
function light(name) {
  lit = name;
  const chart = charts.loss;
  const at = chart ? chart.series.findIndex((one, i) => i && one.label === name) : -1;
  if (chart) chart.setSeries(at > 0 ? at : null, { focus: true });
  for (const one of $("loss-legend").children) one.setAttribute("aria-pressed", String(one.dataset.name === name));
}
function lossLegend(lines) {
  const text = lines.map((line) => line.name + line.stroke).join(), box = $("loss-legend");
  if (box.dataset.text !== text) {
    box.dataset.text = text;
    box.replaceChildren(...lines.map((line) => {
      const button = el("button"), swatch = el("i"); button.type = "button"; button.dataset.name = line.name;
      swatch.style.background = line.stroke;
      button.append(swatch, el("span", line.name), el("b"));
      for (const [event, name] of [["pointerenter", line.name], ["pointerleave", ""], ["focus", line.name], ["blur", ""]]) button.addEventListener(event, () => light(name));
      return button;
    }));
  }
  lines.forEach((line, i) => { box.children[i].lastChild.textContent = loss(line.told.losses[line.told.losses.length - 1]); });
}
// What the pointer is nearest to.
function lossAt(chart) {
  const i = chart.cursor.idx;
  if (i === null || i === undefined || chart.cursor.left < 0) return;
  const there = chart.series.map((one, s) => [one.label, s && chart.data[s][i]]).filter(([, v], s) => s && Number.isFinite(v));
  if (!there.length) return;
  const away = ([, v]) => Math.abs(chart.valToPos(v, "y") - chart.cursor.top), all = there.map(([, v]) => v);
  const [name, v] = there.reduce((a, b) => (away(b) < away(a) ? b : a));
  $("loss-now").textContent = `round ${chart.data[0][i]}: ${name} ${loss(v)}` + (there.length > 1 ? `; ${there.length} lines from ${loss(Math.min(...all))} to ${loss(Math.max(...all))}` : "");
}
function curves(doc) {
  const lines = lossLines(doc), at = new Map();
  lines.forEach(({ told }, s) => told.rounds.forEach((round, i) => { if (!at.has(round)) at.set(round, Array(lines.length).fill(null)); at.get(round)[s] = told.losses[i]; }));
  const xs = [...at.keys()].sort((a, b) => a - b);
  if (!lines.length) $("loss-now").textContent = "no script has told one: sync.log(loss=loss)";
  else if (!$("loss-now").textContent || $("loss-now").textContent.startsWith("no script")) $("loss-now").textContent = "point at a line or at a name";
  lossLegend(lines);
  if (lines.length) {
    const series = lines.map((line) => ({ label: line.name, stroke: line.stroke, dash: line.dash, width: 2, spanGaps: true, points: { show: false } }));
    chart("loss", series, [xs, ...lines.map((_, s) => xs.map((x) => at.get(x)[s]))], "", { focus: { alpha: 0.15 }, hooks: { setCursor: [lossAt] } });
    if (lit) light(lit);
  }
  const r = data.rounds, from = last ? Math.max(0, r.round.length - last) : 0, cut = (v) => v.slice(from);
  if (r.round.length) chart("time", [{ label: "a round", stroke: colour("lagoon"), width: 2, points: { show: false } }, { label: "waited", stroke: colour("sun"), fill: colour("sun") + "33", width: 1.6, points: { show: false } }], [cut(r.round), cut(r.period_s), cut(r.waited_s)], " s");
  $("time-now").textContent = `a round ${span(doc.quick.period_s)}; of that this node waits for the result (filled) ${percent(doc.quick.training_share === null ? null : 1 - doc.quick.training_share)}`;
}
function answers(doc) {
  const text = JSON.stringify(doc.answers), box = $("answers");
  box.closest("section").hidden = !doc.answers.length;
  if (box.dataset.text === text) return;
  box.dataset.text = text;
  box.replaceChildren(...[...doc.answers].reverse().map(([at, round, prompt, answer]) => { const li = el("li"), time = el("time", `round ${round}`); time.dateTime = new Date(at * 1000).toISOString(); const told = el("span"); told.append(el("b", prompt), el("br"), answer); li.append(time, told); return li; }));
}
function log() {
  const box = $("log").parentElement, low = box.scrollTop + box.clientHeight >= box.scrollHeight - 30;
  $("log").replaceChildren(...data.lines.map(([at, kind, text]) => { const li = el("li", null, /trouble|failed|misbehaved|verdict\.raised/.test(kind) ? "bad" : ""); const time = el("time", clock(at)); time.dateTime = new Date(at * 1000).toISOString(); li.append(time, el("span", text)); return li; }));
  if (low) box.scrollTop = box.scrollHeight;
}
function roundsTable() {
  if (!$("rounds-table").closest("details").open) return;
  const r = data.rounds, rows = [];
  for (let i = r.round.length - 1; i >= Math.max(0, r.round.length - 50); i--) rows.push(["", [String(r.round[i]), roundWords(i)]]);
  table($("rounds-table"), ["Round", "What happened"], rows);
}
function draw() {
  const doc = data.doc, began = performance.now();
  head(doc); figures(doc); drawRounds(); members(doc); paths($("paths"), doc.peers); curves(doc); answers(doc); log(); roundsTable();
  $("reach").textContent = doc.reach;
  if (chosen < 0 && data.rounds.round.length) $("round-now").textContent = roundWords(data.rounds.round.length - 1);
  document.body.dataset.drawMs = (performance.now() - began).toFixed(1);
}
const FIELDS = [["sync_every", "Steps a round"], ["codec", "Codec"], ["overlap", "Overlap"], ["peers", "Peers"], ["mbit", "Link, Mbit/s"], ["rtt_ms", "Round trip, ms"], ["step_ms", "A step, ms"], ["parameters", "Parameters"]];
async function whatIf() {
  const query = new URLSearchParams();
  for (const [key] of FIELDS) if ($("w-" + key) && $("w-" + key).value) query.set(key, $("w-" + key).value);
  const told = await ask("/api/what-if?" + query);
  if (!$("what").children.length) for (const [key, text] of FIELDS) {
    const among = told.among[key], label = el("label", text), input = el(among ? "select" : "input"); input.id = "w-" + key; input.name = key;
    if (among) input.append(...among.map((one) => el("option", one))); else { input.inputMode = "decimal"; input.autocomplete = "off"; }
    input.value = told.given[key]; label.htmlFor = input.id; label.append(input); $("what").append(label);
  }
  const f = told.found, rows = f ? [["Training", percent(f.training_share)], ["Steps and wait", span(f.period_s)], ["Up, a round", bytes(f.bytes)]] : [["", told.error]];
  $("what-found").replaceChildren(...rows.map(([a, b]) => { const box = el("div"); box.append(el("dt", a), el("dd", b)); return box; }));
  $("what-price").replaceChildren(...(f ? f.price.map((one) => el("li", one)) : []));
}
async function follow() {
  let asked = false;
  for (;;) {
    try {
      const r = data.rounds ? data.end : 0;
      merge(await ask(`/api/run?changes=${data.changes}&rounds=${r}&lines=${data.lineEnd || 0}`));
      draw();
      $("link").textContent = ""; $("link").className = "link";
      if (!asked) { asked = true; whatIf().catch(() => {}); document.body.dataset.ready = "yes"; }
      await new Promise((done) => setTimeout(done, 250));
    } catch (error) {
      $("link").textContent = `not connected: ${error.message}`; $("link").className = "link bad";
      await new Promise((done) => setTimeout(done, 1500));
    }
  }
}
for (const button of document.querySelectorAll("[data-last]")) button.addEventListener("click", () => {
  last = Number(button.dataset.last); chosen = -1;
  for (const one of document.querySelectorAll("[data-last]")) one.setAttribute("aria-pressed", String(one === button));
  if (data.doc) draw();
});
$("timeline-box").addEventListener("pointermove", (event) => {
  if (!drawn || !drawn.many) return;
  const x = event.clientX - $("timeline-box").getBoundingClientRect().left - drawn.label;
  if (x >= 0) choose(drawn.first + Math.floor(x / drawn.cell));
});
$("timeline-box").addEventListener("keydown", (event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
  if (move) { event.preventDefault(); choose((chosen < 0 ? data.rounds.round.length - 1 : chosen) + move); }
});
$("what").addEventListener("input", () => whatIf().catch(() => {}));
$("what").addEventListener("submit", (event) => event.preventDefault());
$("rounds-table").closest("details").addEventListener("toggle", roundsTable);
for (const query of ["(prefers-color-scheme: dark)"]) matchMedia(query).addEventListener("change", () => data.doc && draw());
addEventListener("resize", () => data.doc && draw());
follow();
