"use strict";
// Figures of a study. There is nothing else to run.

async function begin() {
  const { docs, items } = JSON.parse(document.getElementById("figures").textContent);
  await Bokeh.embed.embed_items(docs, items);
  document.body.dataset.ready = "yes";
}

begin().catch((error) => {
  document.querySelector("header .key").textContent = `This browser cannot show the page: ${error}`;
  document.body.dataset.ready = "failed";
});
