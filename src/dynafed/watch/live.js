(() => {
  "use strict";
  const EVERY = 2000;
  const note = document.createElement("p");
  note.id = "live";
  note.setAttribute("role", "status");
  document.body.append(note);
  const say = (text, lost) => {
    if (note.textContent !== text) note.textContent = text;
    note.classList.toggle("lost", lost);
  };
  let version = "";
  const ask = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetch(`/state?seen=${version}`, { cache: "no-store" });
        if (answer.status === 200) {
          const state = await answer.json();
          version = state.version;
          updatePage(state);
        }
        say(answer.ok ? "live" : "this page couldn’t be made; trying again", !answer.ok);
      } catch {
        say("dynafed watch has ended: this is what it showed last", true);
      }
    }
    setTimeout(ask, EVERY);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) version = ""; });
  say("live", false);
  setTimeout(ask, 300);
})();
