//! `index.html`: the comparison as one file that needs nothing else, on paper, on a phone and by keyboard.

use std::fmt::Write as _;

use super::{
    Backend, CaseRun, Cell, Comparison, Measure, Row, Timeline, Verdict,
    junit::escape,
    lane::{Lane, Promises, time},
};

const STYLE: &str = include_str!("page/style.css");
const SCRIPT: &str = include_str!("page/script.js");

/// Shapes of the verdicts, on a square of 16: they are told apart without colour.
const SHAPES: &str = concat!(
    r#"<symbol id="s-holds" viewBox="0 0 16 16"><path d="M2.5 8.5 6.5 12.5 13.5 4"/></symbol>"#,
    r#"<symbol id="s-breaks" viewBox="0 0 16 16"><path d="M8 2 15 14H1ZM8 6.5V10M8 12v.1"/></symbol>"#,
    r#"<symbol id="s-may" viewBox="0 0 16 16"><path d="M1.5 9.5C4 4.5 6 6 8 8s4 3.5 6.5-1.5"/></symbol>"#,
    r#"<symbol id="s-unsupported" viewBox="0 0 16 16"><circle cx="8" cy="8" r="6.5"/><path d="M3.5 12.5 12.5 3.5"/></symbol>"#,
    r#"<symbol id="s-none" viewBox="0 0 16 16"><path d="M3 8H13"/></symbol>"#,
    r#"<symbol id="s-not-run" viewBox="0 0 16 16"><circle cx="8" cy="8" r="6.5"/></symbol>"#,
    r#"<symbol id="s-fails" viewBox="0 0 16 16"><path d="M3 3 13 13M13 3 3 13"/></symbol>"#,
);

impl Comparison {
    /// Returns the text of `index.html`.
    pub fn to_page(&self, timelines: &[Timeline]) -> String {
        let mut page = String::with_capacity(1 << 20);
        page += "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
        page += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
        page += "<link rel=\"icon\" href=\"data:,\">\n";
        let _ = writeln!(
            page,
            "<title>What each lock store promises</title>\n<style>\n{STYLE}</style>\n</head>\n<body>"
        );
        let _ = writeln!(page, "<svg class=\"stamp\" aria-hidden=\"true\">{SHAPES}</svg>");
        self.header(&mut page);
        page += "<main>\n";
        self.matrix(&mut page);
        self.headlines(&mut page);
        self.topics(&mut page);
        if let Some(kills) = &self.kills {
            kills.section(&mut page);
        }
        for backend in &self.backends {
            profile(&mut page, backend);
            for (row, cell) in self.rows.iter().zip(&backend.cells) {
                dialog(&mut page, backend, row, cell, timelines);
            }
        }
        page += "</main>\n";
        let _ = writeln!(
            page,
            "<footer><p>Written by <code>{}</code>, suite {}. The same for programs is in \
             <a href=\"report.json\">report.json</a> and <a href=\"junit.xml\">junit.xml</a>, as text in \
             <a href=\"SEMANTICS.md\">SEMANTICS.md</a>.</p></footer>",
            self.by, self.suite
        );
        let _ = writeln!(page, "<script>\n{SCRIPT}</script>\n</body>\n</html>");
        page
    }

    fn header(&self, page: &mut String) {
        let cases = self.catalogue().len();
        let stores = match self.backends.len() {
            1 => "one store".to_owned(),
            n => format!("{n} stores"),
        };
        let _ = writeln!(
            page,
            "<header><h1>What each lock store promises</h1>\n<p class=\"lead\">{cases} cases against {stores}: every \
             verdict below was produced by a run, and every history was judged by one checker. Open a cell to see its \
             cases, the numbers they measured, and the timelines that were kept.</p></header>"
        );
    }

    fn matrix(&self, page: &mut String) {
        page.push_str("<section id=\"matrix\" aria-label=\"Comparison\">\n<div class=\"tools\">\n<ul aria-label=\"Verdicts\">\n");
        for (verdict, means) in [
            (Verdict::Holds, "the promise was kept"),
            (Verdict::Breaks(Vec::new()), "it breaks as this store must let it; the resource stayed right"),
            (Verdict::MayBreak(Vec::new()), "a run may show it or not"),
            (Verdict::Unsupported, "refused by a typed error, which was checked"),
            (Verdict::NotApplicable, "does not apply, by design"),
            (Verdict::NotRun, "could not be run here; never a pass"),
            (Verdict::Fails, "not as expected"),
        ] {
            let chip = chip_of(shape(&verdict), verdict.word());
            let _ = writeln!(page, "<li title=\"{means}\">{chip} <span class=\"hidden\">{means}</span></li>");
        }
        page.push_str(
            "</ul>\n<label><input type=\"checkbox\" id=\"differ\"> Only rows in which the stores differ</label>\n</div>\n",
        );
        page.push_str(
            "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"Comparison of the stores\">\n\
             <table class=\"matrix stack\" role=\"table\">\n<thead role=\"rowgroup\"><tr role=\"row\">\
             <th role=\"columnheader\" scope=\"col\">Question</th>",
        );
        for Backend { lane, .. } in &self.backends {
            let _ = write!(
                page,
                "<th role=\"columnheader\" scope=\"col\"><button type=\"button\" aria-haspopup=\"dialog\" \
                 data-open=\"{}\"><b>{}</b><span>{}</span></button></th>",
                slug(&lane.column),
                escape(&lane.profile),
                escape(lane.server.as_deref().unwrap_or("no server"))
            );
        }
        page.push_str("</tr></thead>\n<tbody role=\"rowgroup\">\n");
        for (at, row) in self.rows.iter().enumerate() {
            let cells: Vec<&Cell> = self.backends.iter().map(|backend| &backend.cells[at]).collect();
            let same = cells
                .windows(2)
                .all(|two| two[0].verdict == two[1].verdict && two[0].besides == two[1].besides);
            let _ = writeln!(
                page,
                "<tr role=\"row\"{}><th role=\"rowheader\" scope=\"row\"><b>{}</b> <span>{}</span></th>",
                if same { " class=\"same\"" } else { "" },
                row.title,
                row.asks
            );
            for (backend, cell) in self.backends.iter().zip(cells) {
                cell_of(page, backend, row, cell);
            }
            page.push_str("</tr>\n");
        }
        page.push_str("</tbody>\n</table>\n</div>\n</section>\n");
    }

    fn headlines(&self, page: &mut String) {
        page.push_str("<section id=\"headlines\">\n<h2>In a sentence</h2>\n<ul class=\"cards\">\n");
        for backend in &self.backends {
            let column = &backend.lane.column;
            let _ = writeln!(
                page,
                "<li><h3>{}</h3><p>{}</p>{}<button type=\"button\" aria-haspopup=\"dialog\" data-open=\"{}\">About this \
                 run<span class=\"hidden\"> of {0}</span></button></li>",
                escape(column),
                escape(&backend.headline),
                counts(backend),
                slug(column)
            );
        }
        page.push_str("</ul>\n</section>\n");
    }

    fn topics(&self, page: &mut String) {
        page.push_str("<section id=\"cases\">\n<h2>Case by case</h2>\n");
        let catalogue = self.catalogue();
        let mut rest = &catalogue[..];
        while let Some((topic, ..)) = rest.first() {
            let count = rest.iter().take_while(|(other, ..)| other == topic).count();
            let (cases, others) = rest.split_at(count);
            rest = others;
            let plural = if count == 1 { "1 case".into() } else { format!("{count} cases") };
            let _ = writeln!(
                page,
                "<details><summary><b>{}</b> <span class=\"quiet\">{plural}</span></summary>\n<div class=\"scroll\" \
                 role=\"region\" tabindex=\"0\" aria-label=\"Cases of {0}\"><table class=\"cases stack\" role=\"table\">\
                 <thead role=\"rowgroup\"><tr role=\"row\"><th role=\"columnheader\" scope=\"col\">Case</th>",
                escape(topic)
            );
            for backend in &self.backends {
                let column = escape(&backend.lane.column);
                let _ = write!(
                    page,
                    "<th role=\"columnheader\" scope=\"col\" style=\"padding:.55rem .8rem\">{column}</th>"
                );
            }
            page.push_str("</tr></thead><tbody role=\"rowgroup\">\n");
            for (_, name, promise) in cases {
                let _ = write!(
                    page,
                    "<tr role=\"row\"><th role=\"rowheader\" scope=\"row\"><code>{}</code> <span>{}</span></th>",
                    escape(name),
                    escape(promise)
                );
                for backend in &self.backends {
                    let run = backend.lane.cases.iter().find(|run| run.name == *name);
                    let chip = run.map_or("–".into(), |run| chip(&run.verdict));
                    let _ = write!(
                        page,
                        "<td role=\"cell\" data-column=\"{}\">{chip}</td>",
                        escape(&backend.lane.column)
                    );
                }
                page.push_str("</tr>\n");
            }
            page.push_str("</tbody></table></div></details>\n");
        }
        page.push_str("</section>\n");
    }
}

fn cell_of(page: &mut String, backend: &Backend, row: &Row, cell: &Cell) {
    let column = escape(&backend.lane.column);
    let _ = write!(
        page,
        "<td role=\"cell\"><button type=\"button\" aria-haspopup=\"dialog\" data-open=\"{}\" \
         data-column=\"{column}\"><span>{}</span> <span class=\"said\">{}</span>",
        target(backend, row),
        whole(cell),
        escape(&cell.sentence)
    );
    for measure in &cell.measures {
        let _ = write!(page, " <span class=\"number\">{}</span>", number(backend, measure.short()));
    }
    page.push_str("</button></td>\n");
}

/// Writes the verdict of a cell, and what it does not say.
fn whole(cell: &Cell) -> String {
    let besides = cell.besides.iter().map(|said| format!(" <span class=\"besides\">{}</span>", escape(said)));
    format!("{}{}", chip(&cell.verdict), besides.collect::<String>())
}

/// Writes what a cell opens: its cases, with numbers and timelines.
fn dialog(page: &mut String, backend: &Backend, row: &Row, cell: &Cell, timelines: &[Timeline]) {
    let id = target(backend, row);
    let evidence = matches!(cell.verdict, Verdict::Breaks(_) | Verdict::MayBreak(_) | Verdict::Fails);
    let _ = writeln!(
        page,
        "<dialog id=\"{id}\" aria-labelledby=\"{id}-h\"{}>\n<form method=\"dialog\" class=\"bar\"><h2 id=\"{id}-h\">{} \
         <small>{} · {}</small></h2><button autofocus>Close</button></form>",
        if evidence { " class=\"evidence\"" } else { "" },
        row.title,
        escape(&backend.lane.column),
        row.asks
    );
    let _ = writeln!(page, "<p>{} {}</p>\n<ul class=\"runs\">", whole(cell), escape(&cell.sentence));
    let mut runs: Vec<&CaseRun> = backend.cases(cell).collect();
    // What somebody came for stands first.
    runs.sort_by_key(|run| std::cmp::Reverse(run.verdict.rank()));
    for run in runs {
        let drawn = timelines.iter().find(|t| t.column == backend.lane.column && t.case == run.name);
        // A case may feed two rows; the picture is the same, its ids must not be.
        case(page, backend, run, drawn, run.rows.first().is_none_or(|first| first == row.id));
    }
    page.push_str("</ul>\n</dialog>\n");
}

fn case(page: &mut String, backend: &Backend, run: &CaseRun, drawn: Option<&Timeline>, at_home: bool) {
    let _ = writeln!(page, "<li><h3>{} <code>{}</code></h3>", chip(&run.verdict), escape(&run.name));
    let _ = writeln!(page, "<p>{}</p>", escape(&run.promise));
    if let Some(reason) = &run.reason {
        // A failure ends with a timeline, which needs letters of one width.
        let _ = match run.verdict {
            Verdict::Fails => writeln!(page, "<pre class=\"why\" tabindex=\"0\">{}</pre>", escape(reason)),
            _ => writeln!(page, "<p class=\"why\">{}</p>", escape(reason)),
        };
    }
    for said in &run.evidence.breaks {
        let _ = writeln!(page, "<p class=\"why\">As expected: {}.</p>", escape(said));
    }
    if !run.measures.is_empty() {
        page.push_str("<ul class=\"measures\">");
        for measure in &run.measures {
            let _ = write!(page, "<li>{}</li>", number(backend, measure.to_string()));
        }
        page.push_str("</ul>\n");
    }
    if run.verdict.ran() {
        let _ = writeln!(page, "<p class=\"quiet\">{}</p>", seen(run));
    }
    match drawn {
        Some(Timeline { svg: Ok(svg), text, .. }) if at_home => {
            let _ = writeln!(
                page,
                "<details class=\"drawn\"{2}><summary>Timeline</summary><div class=\"picture\" role=\"region\" tabindex=\"0\" \
                 aria-label=\"Timeline of {0}\">{svg}</div></details>\n<details class=\"text\"><summary>Timeline as text</summary>\
                 <pre tabindex=\"0\">{1}</pre></details>",
                escape(&run.name),
                escape(text),
                // Where something breaks, the picture is the point.
                if matches!(run.verdict, Verdict::Holds) { "" } else { " open" }
            );
        }
        Some(Timeline { svg: Ok(_), .. }) => {
            let home = run.rows.first().and_then(|id| Row::by_id(id)).map_or("another row", |row| row.title);
            let _ = writeln!(page, "<p class=\"quiet\">Its timeline is drawn under “{home}”.</p>");
        }
        Some(Timeline { svg: Err(why), .. }) => {
            let _ = writeln!(page, "<p class=\"quiet\">Its history cannot be drawn: {}</p>", escape(why));
        }
        None => {}
    }
    page.push_str("</li>\n");
}

/// Says what stood in the history of a case.
fn seen(run: &CaseRun) -> String {
    let evidence = &run.evidence;
    let mut parts = vec![format!("{:.2} s", run.seconds)];
    if evidence.seeds > 1 {
        parts.push(format!("{} seeds", evidence.seeds));
    }
    for (count, one, many) in [
        (evidence.grants, "grant", "grants"),
        (evidence.renewals, "renewal", "renewals"),
        (evidence.faults, "fault", "faults"),
        (evidence.accepted, "operation accepted by the resource", "operations accepted by the resource"),
        (evidence.stale, "stale one refused", "stale ones refused"),
    ] {
        if count > 0 {
            parts.push(format!("{count} {}", if count == 1 { one } else { many }));
        }
    }
    parts.join(" · ")
}

/// Writes what there is to know about a lane.
fn profile(page: &mut String, backend: &Backend) {
    let Lane { column, profile, server, date, seed, seconds, ttl_ms, virtual_time, promises, suite, .. } =
        &backend.lane;
    let id = slug(column);
    let _ = writeln!(
        page,
        "<dialog id=\"{id}\" aria-labelledby=\"{id}-h\">\n<form method=\"dialog\" class=\"bar\"><h2 id=\"{id}-h\">{} \
         <small>About this run</small></h2><button autofocus>Close</button></form>\n<p>{}</p>\n{}<dl class=\"facts\">",
        escape(column),
        escape(&backend.headline),
        counts(backend)
    );
    let Promises {
        consistency, fence, wake_up, fair, survives, fence_floor, lock_delay, pushes_loss, ..
    } = promises;
    let yes = |kept: &bool| if *kept { "yes" } else { "no" }.to_owned();
    let [least, most, step] = [promises.ttl_least_ms, promises.ttl_most_ms, promises.ttl_step_ms].map(time);
    let outlives = if survives.is_empty() {
        "nothing of restart, failover, clock step, pause".into()
    } else {
        survives.join(", ")
    };
    let nobody = || "not told".to_owned();
    for (what, value) in [
        ("server", server.clone().unwrap_or_else(nobody)),
        ("began", date.clone()),
        ("took", format!("{seconds:.1} s")),
        ("TTL of the cases", format!("{}{}", time(*ttl_ms), if *virtual_time { ", virtual" } else { "" })),
        ("suite", suite.clone()),
        ("replay", format!("LOCK_SEED={seed}")),
        ("promises: agreement", consistency.clone()),
        ("promises: fence", fence.clone()),
        (
            "promises: waiters",
            format!("{wake_up}, {}", if *fair { "in order of arrival" } else { "no order" }),
        ),
        ("promises: a held lock outlives", outlives),
        ("promises: TTL", format!("{least} to {most}, step {step}")),
        ("promises: fence floor", yes(fence_floor)),
        ("promises: lock-delay", yes(lock_delay)),
        ("promises: tells a loss by event", yes(pushes_loss)),
    ] {
        let _ = writeln!(page, "<dt>{what}</dt><dd>{}</dd>", escape(&value));
    }
    let _ =
        writeln!(page, "</dl>\n<p class=\"quiet\">Profile <code>{}</code>.</p>\n</dialog>", escape(profile));
}

fn counts(backend: &Backend) -> String {
    let mut list = String::from("<ul class=\"counts\" aria-label=\"Verdicts\">");
    let mut words: Vec<_> = backend.lane.cases.iter().map(|run| &run.verdict).collect();
    words.sort_by_key(|verdict| std::cmp::Reverse(verdict.rank()));
    words.dedup_by_key(|verdict| verdict.word());
    for verdict in words {
        let count = backend.counts.get(verdict.word()).copied().unwrap_or_default();
        let _ = write!(list, "<li>{}</li>", chip_of(shape(verdict), &format!("{count} {}", verdict.word())));
    }
    list + "</ul>"
}

fn shape(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Holds => "holds",
        Verdict::Breaks(_) => "breaks",
        Verdict::MayBreak(_) => "may",
        Verdict::Unsupported => "unsupported",
        Verdict::NotApplicable => "none",
        Verdict::NotRun => "not-run",
        Verdict::Fails => "fails",
    }
}

fn chip(verdict: &Verdict) -> String {
    chip_of(shape(verdict), &verdict.to_string())
}

fn chip_of(shape: &str, words: &str) -> String {
    format!(
        "<span class=\"verdict {shape}\"><svg aria-hidden=\"true\"><use href=\"#s-{shape}\"/></svg>{}</span>",
        escape(words)
    )
}

fn number(backend: &Backend, told: String) -> String {
    format!("{}{}", escape(&told), if backend.lane.virtual_time { " (virtual time)" } else { "" })
}

fn target(backend: &Backend, row: &Row) -> String {
    format!("{}--{}", slug(&backend.lane.column), row.id)
}

fn slug(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' }).collect()
}

impl Measure {
    /// Says what was measured, and the median.
    fn short(&self) -> String {
        let told = self.to_string();
        told.split(" (median").next().unwrap_or_default().to_owned()
    }
}
