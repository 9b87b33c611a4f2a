//! What the servers say of themselves by four-letter words, as far as they are allowed to.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// Asks every server. Returns one sentence for each thing that a person should know, and notes which server it is.
pub(crate) async fn look(servers: &[String], bound: Duration, which: &mut Option<String>) -> Vec<String> {
    let mut findings = Vec::new();
    let mut limits: Vec<(String, [Option<u64>; 3])> = Vec::new();
    let mut alone = 0;
    for server in servers {
        let Some(said) = word(server, "srvr", bound).await else {
            findings.push(format!("{server} does not answer; start it, or take it off the list"));
            continue;
        };
        if said.contains("not executed because it is not in the whitelist") {
            findings.push(format!("{server}: version, mode and limits are unknown; allow the word srvr"));
            continue;
        }
        if said.contains("not currently serving") {
            findings.push(format!("{server} is not part of a quorum and serves nobody; look at its log"));
            continue;
        }
        if let Some((major, minor, patch)) = version(&said) {
            which.get_or_insert_with(|| format!("ZooKeeper {major}.{minor}.{patch}"));
        }
        match version(&said) {
            Some(version) if version < (3, 6, 0) => findings.push(format!(
                "{server} runs ZooKeeper {}.{}.{}, which cannot read several nodes in one request; use 3.6 or later",
                version.0, version.1, version.2
            )),
            Some(_) => {}
            None => findings.push(format!("{server}: the version is unknown")),
        }
        match field(&said, "Mode") {
            Some("standalone") => alone += 1,
            Some("leader" | "follower") => {}
            Some("observer") => {
                findings.push(format!("{server} is an observer: it lives as long as its leader is reached"));
            }
            Some("read-only") => {
                findings.push(format!("{server} is cut off from its ensemble and only reads"));
            }
            mode => findings.push(format!("{server}: the mode is unknown ({})", mode.unwrap_or("not said"))),
        }
        let conf = word(server, "conf", bound).await.unwrap_or_default();
        let number = |name| value(&conf, name).and_then(|text| text.parse::<u64>().ok());
        let found = ["tickTime", "minSessionTimeout", "maxSessionTimeout"].map(number);
        if let [Some(tick), Some(least), _] = found
            && least < 2 * tick
        {
            findings.push(format!(
                "{server} allows sessions of {least} ms with ticks of {tick} ms; a lease counts on two ticks at least: \
                 raise minSessionTimeout to {}",
                2 * tick
            ));
        }
        if found[0].is_none() {
            findings.push(format!("{server}: tick and session limits are unknown; allow the word conf"));
        }
        limits.push((server.clone(), found));
    }
    if alone == 1 && servers.len() == 1 {
        findings.push("one server alone: while it is away nobody decides; use three or more".into());
    } else if alone > 0 {
        findings.push(format!(
            "{alone} of {} servers stand alone: they are no ensemble, and each would grant the same lock",
            servers.len()
        ));
    }
    if let Some((first, known)) = limits.first()
        && let Some((other, _)) = limits.iter().find(|(_, found)| found != known)
    {
        findings.push(format!(
            "{first} and {other} have different ticks or session limits; a session that moves may be cut short: make \
             them equal"
        ));
    }
    findings
}

async fn word(server: &str, word: &str, bound: Duration) -> Option<String> {
    let asked = async {
        let mut stream = TcpStream::connect(server).await.ok()?;
        stream.write_all(word.as_bytes()).await.ok()?;
        let mut said = Vec::new();
        // More than this no server says.
        (&mut stream).take(64 * 1024).read_to_end(&mut said).await.ok()?;
        String::from_utf8(said).ok().filter(|said| !said.is_empty())
    };
    tokio::time::timeout(bound, asked).await.ok().flatten()
}

fn field<'a>(said: &'a str, name: &str) -> Option<&'a str> {
    said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

fn value<'a>(said: &'a str, name: &str) -> Option<&'a str> {
    said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).map(str::trim)
}

fn version(said: &str) -> Option<(u32, u32, u32)> {
    let text = field(said, "Zookeeper version")?;
    let mut parts = text.split(['.', '-', ',', ' ']).map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??, parts.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_modes_and_limits_read() {
        let said =
            "Zookeeper version: 3.8.0-${mvngit.commit.id}, built on 2023-02-19 16:17 UTC\nMode: leader\n";
        assert_eq!((version(said), field(said, "Mode")), (Some((3, 8, 0)), Some("leader")));
        assert_eq!(version("Zookeeper version: 3.5\n"), None);
        assert_eq!(value("tickTime=200\nmaxSessionTimeout=4000\n", "tickTime"), Some("200"));
    }
}
