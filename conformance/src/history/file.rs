//! Reading histories: one file or several, of one machine and boot.

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use lockcore::backend::Moment;

use super::{ClockKind, Event, Header, Rules, What};

/// A recorded history, in the order of its stamps.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct History {
    /// What the files say about themselves.
    pub headers: Vec<Header>,
    /// The events; sorted, an invocation before what else has its stamp.
    pub events: Vec<Event>,
}

/// Why a history cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HistoryError {
    /// The file system said no.
    #[error("{}: {source}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// A line is not an event.
    #[error("{}, line {line}: {source}", path.display())]
    Line {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1.
        line: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// The file has no header.
    #[error(
        "{}: not a history: the first line is no header with \"schema\":\"{}\"",
        path.display(),
        Header::SCHEMA
    )]
    NoHeader {
        /// Which file.
        path: PathBuf,
    },
    /// The file is of a newer form.
    #[error("{}: written in version {version} of the form, this program reads up to {}", path.display(), Header::VERSION)]
    Version {
        /// Which file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// The files do not belong together.
    #[error("the stamps do not compare: the files come from different clocks, machines or boots")]
    Clocks,
}

impl History {
    /// Joins and sorts events.
    pub fn new(headers: Vec<Header>, mut events: Vec<Event>) -> Self {
        // An invocation at the same stamp as its answer came before it, whatever the order of the lines.
        events.sort_by_key(|e| (e.ts, rank(&e.what)));
        Self { headers, events }
    }

    /// Writes down under which rules it was judged, so that judging it again needs no word of them.
    #[must_use]
    pub fn under(mut self, rules: Rules) -> Self {
        if let Some(header) = self.headers.first_mut() {
            header.rules = Some(Box::new(rules));
        }
        self
    }

    /// Reads files and joins them.
    ///
    /// # Errors
    /// A file is missing, a line is no event, or the files come from different clocks. A last line without its end,
    /// as a killed process leaves it, is not an error; it becomes a note.
    pub fn read<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<Self, HistoryError> {
        let (mut headers, mut events) = (Vec::new(), Vec::new());
        for path in paths {
            let path = path.as_ref();
            let text = fs::read(path)
                .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
                .map_err(|source| HistoryError::File { path: path.into(), source })?;
            parse(path, &text, &mut headers, &mut events)?;
        }
        let first = headers.first().map(|h: &Header| (h.clock, h.boot.clone()));
        if headers.iter().any(|h| Some((h.clock, h.boot.clone())) != first) {
            return Err(HistoryError::Clocks);
        }
        Ok(Self::new(headers, events))
    }

    /// Reads the text of one file.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(text: &str) -> Result<Self, HistoryError> {
        let (mut headers, mut events) = (Vec::new(), Vec::new());
        parse(Path::new("history"), text, &mut headers, &mut events)?;
        Ok(Self::new(headers, events))
    }

    /// Writes one file.
    ///
    /// # Errors
    /// The file system said no.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), HistoryError> {
        let path = path.as_ref();
        let fail = |source| HistoryError::File { path: path.into(), source };
        let mut file = io::BufWriter::new(fs::File::create(path).map_err(fail)?);
        file.write_all(self.to_text().as_bytes()).and_then(|()| file.flush()).map_err(fail)
    }

    /// Returns the text of one file.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for header in &self.headers {
            text.push_str(&line(header));
        }
        for event in &self.events {
            text.push_str(&line(event));
        }
        text
    }

    /// Returns the rules that the recorder wrote down, if any.
    pub fn rules(&self) -> Option<&Rules> {
        self.headers.iter().find_map(|h| h.rules.as_deref())
    }

    /// Says whether deadlines can be judged: no stamp was read on a clock that stops in a suspend.
    pub fn clock_runs_in_suspend(&self) -> bool {
        self.headers.iter().all(|h| h.clock != ClockKind::Monotonic)
    }

    /// Returns the first stamp.
    pub fn start(&self) -> Moment {
        self.events.first().map_or(Moment::from_nanos(0), |e| e.ts)
    }

    /// Returns the names of the locks, sorted.
    pub fn keys(&self) -> Vec<&str> {
        let mut keys: Vec<_> = self.events.iter().map(|e| e.key.as_str()).filter(|k| !k.is_empty()).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }
}

/// Puts one value on a line. A line is written in one piece, so that several processes may append to one file.
pub(super) fn line<T: serde::Serialize>(value: &T) -> String {
    // Events and headers have string keys and finite numbers only; JSON can hold all of that.
    let mut line = serde_json::to_string(value).expect("an event fits into JSON");
    line.push('\n');
    line
}

fn rank(what: &What) -> u8 {
    match what {
        What::Invoke { .. } => 0,
        What::Sent { .. } => 1,
        _ => 2,
    }
}

fn parse(
    path: &Path,
    text: &str,
    headers: &mut Vec<Header>,
    events: &mut Vec<Event>,
) -> Result<(), HistoryError> {
    let mut seen_header = false;
    let mut last = Moment::from_nanos(0);
    let lines: Vec<_> = text.split_inclusive('\n').collect();
    for (at, line) in lines.iter().enumerate() {
        let number = at + 1;
        if line.trim().is_empty() {
            continue;
        }
        if line.contains(Header::SCHEMA)
            && let Ok(header) = serde_json::from_str::<Header>(line)
        {
            if header.version > Header::VERSION {
                return Err(HistoryError::Version { path: path.into(), version: header.version });
            }
            headers.push(header);
            seen_header = true;
            continue;
        }
        if !seen_header {
            return Err(HistoryError::NoHeader { path: path.into() });
        }
        match serde_json::from_str::<Event>(line) {
            Ok(event) => {
                last = last.max(event.ts);
                events.push(event);
            }
            // The writer died within its last line, which is as if it had died before it: nothing that was
            // recorded is missing.
            Err(_) if number == lines.len() && !line.ends_with('\n') => events.push(Event {
                ts: last,
                pid: 0,
                client: String::new(),
                key: String::new(),
                op: String::new(),
                attempt: 0,
                what: What::Note { text: format!("{}: the last line is torn", path.display()) },
            }),
            Err(source) => return Err(HistoryError::Line { path: path.into(), line: number, source }),
        }
    }
    if !seen_header {
        return Err(HistoryError::NoHeader { path: path.into() });
    }
    Ok(())
}
