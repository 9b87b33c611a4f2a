//! The record of a migration's phases as a node's data: one line each for migration, epoch, open phases, floor.

use lockcore::backend::{Error, ErrorKind, PhaseRecord, Result};

pub(crate) fn write(record: &PhaseRecord) -> Vec<u8> {
    let open: Vec<String> = record.open.iter().map(|phase| escape(phase)).collect();
    let floor = record.floor.map_or_else(String::new, |floor| floor.to_string());
    format!("{}\n{}\n{}\n{floor}", escape(&record.migration), record.epoch, open.join(",")).into_bytes()
}

pub(crate) fn read(data: &[u8]) -> Result<PhaseRecord> {
    parse(data).ok_or_else(|| {
        Error::new(ErrorKind::Misconfigured, "the record of the phases holds something that is not ours")
    })
}

fn parse(data: &[u8]) -> Option<PhaseRecord> {
    let mut lines = std::str::from_utf8(data).ok()?.split('\n');
    let mut record = PhaseRecord::new(unescape(lines.next()?)?, lines.next()?.parse().ok()?);
    let (open, floor) = (lines.next()?, lines.next()?);
    if !open.is_empty() {
        record.open = open.split(',').map(unescape).collect::<Option<_>>()?;
    }
    if !floor.is_empty() {
        record.floor = Some(floor.parse().ok()?);
    }
    lines.next().is_none().then_some(record)
}

fn escape(text: &str) -> String {
    text.replace('%', "%25").replace(',', "%2C").replace('\n', "%0A")
}

fn unescape(text: &str) -> Option<String> {
    let text = text.replace("%0A", "\n").replace("%2C", ",");
    let left = text.replace("%25", "");
    (!left.contains('%')).then(|| text.replace("%25", "%"))
}

#[cfg(test)]
mod tests {
    use lockcore::backend::Fence;

    use super::*;

    #[test]
    fn a_record_reads_back() {
        let mut record = PhaseRecord::new("redis,to zk\n%2C", 7);
        assert_eq!(read(&write(&record)).unwrap(), record);
        record.open = vec!["from".into(), "b,o%th".into()];
        record.floor = Some(Fence::MAX);
        assert_eq!(read(&write(&record)).unwrap(), record);
        for foreign in ["", "a\n1\n", "a\nx\n\n", "a\n1\n\n\n\n", "%\n1\n\n"] {
            assert_eq!(read(foreign.as_bytes()).unwrap_err().kind(), ErrorKind::Misconfigured, "{foreign:?}");
        }
    }
}
