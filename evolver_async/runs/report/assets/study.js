"use strict";
// Figures of a study, and from a point of a curve by step the way to the trajectories of its runs.

const byId = (id) => document.getElementById(id);

// The nearest step of any curve and, of the curves that have it, the nearest one.
function nearest(figure, x, y) {
  let found = null;
  for (const { data_source: source } of figure.renderers) {
    const places = Array.from(source.data.place), means = Array.from(source.data.mean);
    places.forEach((place, row) => {
      const far = [Math.abs(place - x), Math.abs(means[row] - y)];
      if (!found || far[0] < found.far[0] || (far[0] === found.far[0] && far[1] < found.far[1])) {
        found = { far, cell: source.name, step: place };
      }
    });
  }
  return found;
}

function showRuns(figure, event, pages) {
  const found = nearest(figure, event.x, event.y);
  if (!found) return;
  const { cell, step } = found, links = byId("points");
  links.replaceChildren(`${cell}, step ${step}: trajectories of seed `);
  (pages[cell] ?? []).forEach(([seed, href], number) => {
    const link = Object.assign(document.createElement("a"), { textContent: seed });
    link.href = `${href}#step=${Math.round(step)}`;
    links.append(number ? ", " : "", link);
  });
  if (!pages[cell]) links.replaceChildren(`${cell}, step ${step}: none of its runs has a page yet.`);
  links.hidden = false;
}

async function begin() {
  const { docs, items } = JSON.parse(byId("figures").textContent);
  const pages = JSON.parse(byId("pages").textContent);
  await Bokeh.embed.embed_items(docs, items);
  for (const drawn of Bokeh.documents) {
    for (const root of drawn.roots().filter((one) => one.name === "by-step")) {
      root.on_event("tap", (event) => showRuns(root, event, pages));
    }
  }
  document.body.dataset.ready = "yes";
}

begin().catch((error) => {
  document.querySelector("header .key").textContent = `This browser cannot show the page: ${error}`;
  document.body.dataset.ready = "failed";
});
