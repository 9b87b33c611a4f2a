//! The timeline as SVG: time runs right, one lane for each client, nothing needed but a viewer.

use std::fmt::Write as _;

use super::scene::{Mark, Scene};
use crate::history::{History, Report, check::index::span};

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 30.0;
const LANE: f64 = 44.0;
const TOP: f64 = 112.0;
/// Rows beyond which a picture shows nothing any more.
const MOST_ROWS: usize = 1000;

/// Draws what happened to one lock as an SVG document without scripts.
///
/// # Shape
/// Bars show when a client believed that it held the lock, with the fence; shapes tell the kinds of events apart, not
/// colours alone; every mark has its words as a tool tip. Stretches in which nothing happened are cut short and
/// marked. What `report` found is numbered in the picture and listed below it.
pub fn svg(history: &History, report: Option<&Report>, key: &str) -> String {
    draw(history, report, key, None)
}

/// Draws the same to stand inside a page: the page has the style, for the class `timeline`, and `id` is unique in it.
pub(crate) fn svg_in_a_page(history: &History, report: Option<&Report>, key: &str, id: &str) -> String {
    draw(history, report, key, Some(id))
}

fn draw(history: &History, report: Option<&Report>, key: &str, id: Option<&str>) -> String {
    let mut scene = Scene::new(history, report, key);
    let left_out = scene.crop(MOST_ROWS);
    let scale = Scale::new(&scene);
    let bottom = TOP + LANE * scene.lanes.len() as f64;
    let mut findings = String::new();
    let below = list(&mut findings, &scene, bottom + 62.0);
    let height = below + 16.0;

    let mut page = String::new();
    let name = escape(&scene.key);
    let class = if id.is_some() { r#" class="timeline""# } else { "" };
    let prefix = id.map(|id| format!("{id}-")).unwrap_or_default();
    let _ = writeln!(
        page,
        r#"<svg xmlns="http://www.w3.org/2000/svg"{class} viewBox="0 0 {WIDTH} {height:.0}" width="{WIDTH}" height="{height:.0}" role="img" aria-labelledby="{prefix}title {prefix}desc">"#
    );
    let _ = writeln!(page, r#"<title id="{prefix}title">Timeline of {name}</title>"#);
    let _ = writeln!(page, r#"<desc id="{prefix}desc">{}</desc>"#, escape(&summary(&scene)));
    if id.is_none() {
        page.push_str(STYLE);
    }
    let _ = writeln!(page, r#"<rect class="page" width="{WIDTH}" height="{height:.0}"/>"#);
    let _ = writeln!(page, r#"<text class="name" x="16" y="30">{name}</text>"#);
    if left_out > 0 {
        let _ = writeln!(
            page,
            r#"<text class="small" x="{:.0}" y="30" text-anchor="end">{left_out} events before or after are left out</text>"#,
            WIDTH - RIGHT
        );
    }
    legend(&mut page);
    troubles(&mut page, &scene, &scale, bottom);
    axis(&mut page, &scene, &scale, bottom);
    lanes(&mut page, &scene);
    spans(&mut page, &scene, &scale);
    evidence(&mut page, &scene, &scale, bottom);
    marks(&mut page, &scene, &scale);
    page.push_str(&findings);
    page.push_str("</svg>\n");
    page
}

// All colours have a contrast of at least 4.5 to what they stand on.
const STYLE: &str = r#"<style>
.page { fill: #ffffff }
text { font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 13px; fill: #1a1a1a }
.name { font-size: 18px; font-weight: 600 }
.small { font-size: 11px; fill: #4a4a4a }
.lane { stroke: #c8c8c8; stroke-width: 1 }
.grid { stroke: #e4e4e4; stroke-width: 1 }
.cut { stroke: #767676; stroke-width: 1; stroke-dasharray: 1 4 }
.trouble { fill: #f6e3c5 }
.held { stroke: #ffffff; stroke-width: 1 }
.even { fill: #1f5fa8 }
.odd { fill: #0b6b50 }
.fence { fill: #ffffff; font-size: 12px; font-weight: 600 }
.pending { stroke: #6a6a6a; stroke-width: 1.5; stroke-dasharray: 4 3; fill: none }
.good { stroke: #0b6b50; stroke-width: 2; fill: #ffffff }
.bad { stroke: #b3261e; stroke-width: 2.5; fill: none }
.plain { stroke: #1a1a1a; stroke-width: 1.5; fill: #ffffff }
.renewed { stroke: #ffffff; stroke-width: 2.5 }
.finding { stroke: #b3261e; stroke-width: 1.5; stroke-dasharray: 6 3 }
.tag { fill: #b3261e; font-weight: 700 }
</style>
"#;

/// Maps moments to places. A stretch without events is drawn no longer than eight times the mean.
struct Scale {
    /// Moments and their places.
    points: Vec<(u64, f64)>,
    /// Places and lengths of the stretches that were cut.
    cuts: Vec<(f64, u64)>,
}

impl Scale {
    fn new(scene: &Scene) -> Self {
        let mut times: Vec<u64> = scene.rows.iter().map(|r| r.ts).collect();
        times.extend(scene.held.iter().flat_map(|h| [h.span.from, h.span.to]));
        times.extend(scene.troubles.iter().flat_map(|t| [t.from, t.to]));
        times.push(scene.end);
        times.sort_unstable();
        times.dedup();
        let gaps: Vec<u64> = times.windows(2).map(|w| w[1] - w[0]).collect();
        let total: u64 = gaps.iter().sum();
        let most = (total / gaps.len().max(1) as u64).saturating_mul(8).max(1);
        let drawn: f64 = gaps.iter().map(|&g| g.min(most) as f64).sum();
        let unit = if drawn > 0.0 { (WIDTH - LEFT - RIGHT) / drawn } else { 0.0 };
        let mut place = LEFT;
        let mut points = Vec::with_capacity(times.len());
        let mut cuts = Vec::new();
        for (at, &ts) in times.iter().enumerate() {
            if at > 0 {
                let gap = gaps[at - 1];
                let step = gap.min(most) as f64 * unit;
                if gap > most {
                    cuts.push((place + step / 2.0, gap));
                }
                place += step;
            }
            points.push((ts, place));
        }
        Self { points, cuts }
    }

    fn x(&self, ts: u64) -> f64 {
        let after = self.points.partition_point(|p| p.0 < ts);
        match (self.points.get(after.wrapping_sub(1)), self.points.get(after)) {
            (_, Some(&(at, x))) if at == ts => x,
            (Some(&(a, xa)), Some(&(b, xb))) => xa + (xb - xa) * ((ts - a) as f64 / (b - a) as f64),
            (Some(&(_, x)), None) | (None, Some(&(_, x))) => x,
            (None, None) => LEFT,
        }
    }
}

fn summary(scene: &Scene) -> String {
    let clients = scene.lanes.iter().filter(|l| !l.is_resource).count();
    let found = match scene.findings.len() {
        0 => "nothing was found".to_owned(),
        1 => format!("one finding: {} {}", scene.findings[0].0, scene.findings[0].1),
        n => format!("{n} findings, the first: {} {}", scene.findings[0].0, scene.findings[0].1),
    };
    format!(
        "{clients} clients, {} events in {}; {found}",
        scene.rows.len(),
        span(scene.end.saturating_sub(scene.start))
    )
}

fn legend(page: &mut String) {
    let mut x = 16.0;
    let mut entry = |shape: &str, words: &str| {
        let _ = writeln!(page, r#"<g transform="translate({x:.0} 52)">{shape}</g>"#);
        let _ = writeln!(page, r#"<text class="small" x="{:.0}" y="56">{words}</text>"#, x + 28.0);
        x += 40.0 + 6.2 * words.len() as f64;
    };
    entry(r#"<rect class="held even" x="0" y="-7" width="22" height="14"/>"#, "believes it holds");
    entry(r#"<path class="pending" d="M0 0H22"/>"#, "call under way");
    entry(
        r#"<rect class="even" x="0" y="-7" width="22" height="14"/><path class="renewed" d="M11 -7V7"/>"#,
        "renewed",
    );
    entry(r#"<path class="plain" d="M6 -8H16V8H6"/>"#, "releases");
    entry(r#"<path class="plain" d="M11 -9V9"/>"#, "deadline");
    entry(r#"<path class="bad" d="M5 -6L17 6M5 6L17 -6"/>"#, "lost, refused, stale");
    entry(r#"<circle class="good" cx="11" cy="0" r="5"/>"#, "accepted");
    entry(r#"<path class="plain" d="M6 -3H16M6 3H16"/>"#, "duplicate");
    entry(r#"<path class="plain" d="M11 -5L16 4H6Z"/>"#, "no answer");
    entry(r#"<rect class="trouble" x="0" y="-8" width="22" height="16"/>"#, "fault");
}

fn troubles(page: &mut String, scene: &Scene, scale: &Scale, bottom: f64) {
    for (row, trouble) in scene.troubles.iter().enumerate() {
        let (from, to) = (scale.x(trouble.from), scale.x(trouble.to));
        let width = (to - from).max(3.0);
        let name = escape(&trouble.name);
        let _ = writeln!(
            page,
            r#"<rect class="trouble" x="{from:.1}" y="{:.0}" width="{width:.1}" height="{:.0}"><title>{name}</title></rect>"#,
            TOP - 28.0,
            bottom - TOP + 28.0
        );
        // Neighbours take turns on two heights.
        let y = TOP - 16.0 + 11.0 * (row % 2) as f64;
        let _ = writeln!(page, r#"<text class="small" x="{:.1}" y="{y:.0}">{name}</text>"#, from + 3.0);
    }
}

fn axis(page: &mut String, scene: &Scene, scale: &Scale, bottom: f64) {
    let mut last = f64::MIN;
    for &(ts, x) in &scale.points {
        if x - last < 110.0 {
            continue;
        }
        last = x;
        let anchor = if x > WIDTH - 60.0 { "end" } else { "middle" };
        let _ = writeln!(page, r#"<path class="grid" d="M{x:.1} {TOP:.0}V{bottom:.0}"/>"#);
        let _ = writeln!(
            page,
            r#"<text class="small" x="{x:.1}" y="{:.0}" text-anchor="{anchor}">{}</text>"#,
            bottom + 18.0,
            scene.at(ts)
        );
    }
    if scene.held.iter().any(|h| h.span.to > scene.end) {
        let x = scale.x(scene.end);
        let _ = writeln!(page, r#"<path class="cut" d="M{x:.1} {:.0}V{bottom:.0}"/>"#, TOP - 10.0);
        let _ = writeln!(
            page,
            r#"<text class="small" x="{:.1}" y="{:.0}" text-anchor="end">recording ends</text>"#,
            x - 4.0,
            TOP - 4.0
        );
    }
    for &(x, gap) in &scale.cuts {
        let _ = writeln!(
            page,
            r#"<path class="cut" d="M{x:.1} {TOP:.0}V{bottom:.0}"><title>{} in which nothing happened</title></path>"#,
            span(gap)
        );
        let _ = writeln!(
            page,
            r#"<text class="small" x="{x:.1}" y="{:.0}" text-anchor="middle">({} cut)</text>"#,
            bottom + 32.0,
            span(gap)
        );
    }
}

fn middle(lane: usize) -> f64 {
    TOP + LANE * (lane as f64 + 0.5)
}

fn lanes(page: &mut String, scene: &Scene) {
    for (number, lane) in scene.lanes.iter().enumerate() {
        let y = middle(number);
        let name: String = lane.name.chars().take(18).collect();
        let _ = writeln!(page, r#"<text x="16" y="{:.0}">{}</text>"#, y + 4.0, escape(&name));
        let _ = writeln!(page, r#"<path class="lane" d="M{LEFT} {y:.0}H{}"/>"#, WIDTH - RIGHT);
    }
}

fn spans(page: &mut String, scene: &Scene, scale: &Scale) {
    for pending in &scene.pending {
        let (from, to, y) = (scale.x(pending.from), scale.x(pending.to), middle(pending.lane));
        let _ = writeln!(page, r#"<path class="pending" d="M{from:.1} {y:.0}H{:.1}"/>"#, to.max(from + 1.0));
    }
    // Grants take turns in colour, so that neighbours can be told apart.
    let mut fences: Vec<i64> = scene.held.iter().map(|h| h.fence).collect();
    fences.sort_unstable();
    fences.dedup();
    for held in &scene.held {
        let (from, to, y) = (scale.x(held.span.from), scale.x(held.span.to), middle(held.span.lane));
        let width = (to - from).max(2.0);
        let class = if fences.partition_point(|&f| f < held.fence) % 2 == 0 { "even" } else { "odd" };
        let _ = writeln!(
            page,
            r#"<rect class="held {class}" x="{from:.1}" y="{:.0}" width="{width:.1}" height="18"><title>fence {}, from {} to {}</title></rect>"#,
            y - 9.0,
            held.fence,
            scene.at(held.span.from),
            scene.at(held.span.to)
        );
        let label = format!("fence {}", held.fence);
        // About seven units a letter; a label that does not fit stands above the bar.
        if 7.2 * label.len() as f64 + 6.0 <= width {
            let _ = writeln!(
                page,
                r#"<text class="fence" x="{:.1}" y="{:.0}">{label}</text>"#,
                from + 4.0,
                y + 4.0
            );
        } else {
            let _ = writeln!(
                page,
                r#"<text class="small" x="{from:.1}" y="{:.0}">{}</text>"#,
                y - 12.0,
                held.fence
            );
        }
    }
}

fn evidence(page: &mut String, scene: &Scene, scale: &Scale, bottom: f64) {
    for finding in 0..scene.findings.len() {
        let last = scene.rows.iter().rev().find(|r| r.shows.contains(&finding));
        let Some(row) = last else { continue };
        let x = scale.x(row.ts);
        let _ = writeln!(page, r#"<path class="finding" d="M{x:.1} {:.0}V{bottom:.0}"/>"#, TOP - 6.0);
        // Findings at one place stand side by side.
        let nudge = 12.0 * (finding % 4) as f64;
        let _ = writeln!(
            page,
            r#"<text class="tag" x="{:.1}" y="{:.0}">{}</text>"#,
            x + 3.0 + nudge,
            TOP + 2.0,
            finding + 1
        );
    }
}

fn marks(page: &mut String, scene: &Scene, scale: &Scale) {
    for row in &scene.rows {
        let Some(lane) = row.lane else { continue };
        let x = scale.x(row.ts);
        let held =
            || scene.held.iter().any(|h| h.span.lane == lane && h.span.from <= row.ts && row.ts < h.span.to);
        // A question stands below a bar, so that it does not hide the fence.
        let y = middle(lane) + if row.mark == Mark::Asks && held() { 14.0 } else { 0.0 };
        let (class, path) = match row.mark {
            Mark::Asks => ("plain", "M-2.5 0A2.5 2.5 0 1 1 2.5 0A2.5 2.5 0 1 1 -2.5 0".to_owned()),
            Mark::Granted => ("plain", "M0 -11V11".to_owned()),
            Mark::Renewed => ("renewed", "M0 -9V9".to_owned()),
            Mark::Released => ("plain", "M-5 -11H0V11H-5".to_owned()),
            Mark::DeadlinePassed => ("plain", "M0 -13V13".to_owned()),
            Mark::Lost | Mark::Failed | Mark::Stale => ("bad", "M-5 -5L5 5M-5 5L5 -5".to_owned()),
            Mark::Unknown | Mark::GaveUp => ("plain", "M0 -6L5 4H-5Z".to_owned()),
            Mark::Accepted => ("good", "M-5 0A5 5 0 1 1 5 0A5 5 0 1 1 -5 0".to_owned()),
            Mark::Duplicate => ("plain", "M-5 -3H5M-5 3H5".to_owned()),
            Mark::Fault | Mark::Probe | Mark::Other => continue,
        };
        let _ = writeln!(
            page,
            r#"<path class="{class}" transform="translate({x:.1} {y:.0})" d="{path}"><title>{} {} {}</title></path>"#,
            scene.at(row.ts),
            escape(&scene.lanes[lane].name),
            escape(&row.words)
        );
    }
}

/// Lists the findings; returns where the list ends.
fn list(page: &mut String, scene: &Scene, mut y: f64) -> f64 {
    // More would hide the picture; the report has them all.
    const MOST: usize = 12;
    for (number, (property, says)) in scene.findings.iter().take(MOST).enumerate() {
        for (at, line) in lines(&format!("{property} {says}"), 150).iter().enumerate() {
            if at == 0 {
                let _ = writeln!(page, r#"<text class="tag" x="16" y="{y:.0}">{}</text>"#, number + 1);
            }
            let _ = writeln!(page, r#"<text x="40" y="{y:.0}">{}</text>"#, escape(line));
            y += 18.0;
        }
        y += 4.0;
    }
    if scene.findings.len() > MOST {
        let more = scene.findings.len() - MOST;
        let _ = writeln!(page, r#"<text class="small" x="40" y="{y:.0}">and {more} more</text>"#);
        y += 18.0;
    }
    y
}

fn lines(words: &str, room: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in words.split(' ') {
        // There is always a last line.
        let last = lines.len() - 1;
        if !lines[last].is_empty() && lines[last].chars().count() + word.chars().count() >= room {
            lines.push(word.to_owned());
        } else {
            if !lines[last].is_empty() {
                lines[last].push(' ');
            }
            lines[last].push_str(word);
        }
    }
    lines
}

/// Makes a text safe inside an element, and drops what XML cannot hold.
fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}
