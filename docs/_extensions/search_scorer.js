// How the site's search ranks results: tasks, then the name of an object itself, then guides, then the rest.
var Scorer = {
  score: ([docname, , , , score, , kind]) => {
    if (kind === "index") return score + 100;
    if (/^(guides\/|start$|concepts$|examples$|coming-from-)/.test(docname)) return score + 40;
    return /^(benchmarks|design|methods-compared)/.test(docname) ? score - 10 : score;
  },
  objNameMatch: 60,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
