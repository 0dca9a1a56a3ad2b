//! Text form of fault scripts.

use std::str::FromStr;
use std::time::Duration;

use rustix::io::Errno;

use super::{Call, Effect, FaultEvent, FaultRule, FaultScript, MAX_DELAY, MAX_RULES, MAX_SCRIPT_BYTES};

/// Why a script was refused; nothing of it takes effect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("fault script line {line}: {reason}")]
pub struct ScriptError {
    /// Line, counted from 1.
    pub line: usize,
    /// What is wrong with which word.
    pub reason: String,
}

impl FromStr for FaultScript {
    type Err = ScriptError;

    fn from_str(text: &str) -> Result<Self, ScriptError> {
        if text.len() > MAX_SCRIPT_BYTES {
            let reason = format!("the script has {} bytes, at most {MAX_SCRIPT_BYTES} are taken", text.len());
            return Err(ScriptError { line: 1, reason });
        }
        let mut rules = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let failed = |reason| ScriptError { line: index + 1, reason };
            let content = line.split_once('#').map_or(line, |(before, _)| before).trim();
            if content.is_empty() {
                continue;
            }
            if rules.len() == MAX_RULES {
                return Err(failed(format!("more than {MAX_RULES} rules")));
            }
            rules.push(parse_rule(content).map_err(failed)?);
        }
        Ok(Self { rules })
    }
}

/// The words of one side of a rule, taken from the front.
struct Words<'a> {
    words: std::iter::Peekable<std::str::SplitWhitespace<'a>>,
}

impl<'a> Words<'a> {
    fn of(text: &'a str) -> Self {
        Self { words: text.split_whitespace().peekable() }
    }

    fn next(&mut self, wanted: &str) -> Result<&'a str, String> {
        self.words.next().ok_or_else(|| format!("{wanted} is missing"))
    }

    fn expect(&mut self, word: &str) -> Result<(), String> {
        match self.next(&format!("`{word}`"))? {
            found if found == word => Ok(()),
            found => Err(format!("`{found}` stands where `{word}` is wanted")),
        }
    }

    fn take(&mut self, word: &str) -> bool {
        self.words.next_if_eq(&word).is_some()
    }

    fn number<T: FromStr>(&mut self, wanted: &str) -> Result<T, String> {
        let word = self.next(wanted)?;
        word.parse().map_err(|_| format!("`{word}` is no {wanted}"))
    }

    fn end(mut self) -> Result<(), String> {
        self.words.next().map_or(Ok(()), |word| Err(format!("`{word}` is one word too many")))
    }
}

fn parse_rule(content: &str) -> Result<FaultRule, String> {
    let (when, what) = content.split_once(": ").ok_or("no `: ` between when and what")?;
    let mut when = Words::of(when);
    let what = Words::of(what);
    match when.next("a trigger")? {
        "at" => {
            let ops = when.number("count of operations")?;
            when.expect("ops")?;
            when.expect("on")?;
            let hca = when.next("an hca")?.to_owned();
            when.end()?;
            let event = parse_event(&hca, what)?;
            Ok(FaultRule::AtOps { hca, ops, event })
        }
        "hca" => {
            let hca = when.next("an hca")?;
            when.end()?;
            Ok(FaultRule::Now(parse_event(hca, what)?))
        }
        "gpu" => {
            let gpu = when.next("a gpu")?;
            when.end()?;
            Ok(FaultRule::Now(parse_gpu_event(gpu, what)?))
        }
        word => parse_on_call(word, when, what),
    }
}

fn parse_event(hca: &str, mut words: Words<'_>) -> Result<FaultEvent, String> {
    let hca = hca.to_owned();
    let word = words.next("an event")?;
    if word == "gpu" {
        let gpu = words.next("a gpu")?;
        return parse_gpu_event(gpu, words);
    }
    if word == "fatal" || word == "go-on" {
        words.end()?;
        return Ok(if word == "fatal" { FaultEvent::DeviceFatal { hca } } else { FaultEvent::HcaGoesOn { hca } });
    }
    if !matches!(word, "link-down" | "link-up" | "gid-change") {
        return Err(format!("`{word}` is no event; link-down, link-up, gid-change, fatal, go-on and gpu are"));
    }
    words.expect("port")?;
    let port_num = words.number("port number")?;
    words.end()?;
    Ok(match word {
        "link-down" => FaultEvent::LinkDown { hca, port_num },
        "link-up" => FaultEvent::LinkUp { hca, port_num },
        _ => FaultEvent::GidChange { hca, port_num },
    })
}

fn parse_gpu_event(gpu: &str, mut words: Words<'_>) -> Result<FaultEvent, String> {
    let gpu = gpu.to_owned();
    let event = match words.next("lost, healthy or go-on")? {
        "lost" => FaultEvent::GpuLost { gpu },
        "healthy" => FaultEvent::GpuHealthy { gpu },
        "go-on" => FaultEvent::GpuGoesOn { gpu },
        word => return Err(format!("`{word}` is none of lost, healthy and go-on")),
    };
    words.end()?;
    Ok(event)
}

fn parse_on_call(word: &str, mut when: Words<'_>, mut what: Words<'_>) -> Result<FaultRule, String> {
    let Some((_, call)) = Call::ALL.iter().find(|(name, _)| *name == word) else {
        let calls: Vec<_> = Call::ALL.iter().map(|(name, _)| *name).collect();
        return Err(format!("`{word}` is no trigger; at, hca, gpu and the calls {} are", calls.join(", ")));
    };
    let target = if when.take("on") { Some(when.next("a device")?.to_owned()) } else { None };
    let after = if when.take("after") { when.number("count of calls")? } else { 0 };
    when.end()?;
    let effect = match what.next("fail, delay, hang or cost")? {
        "fail" | "hang" if *call == Call::Completion => {
            return Err("completions can be delayed, not failed, and do not hang".to_owned());
        }
        "fail" => Effect::Fail(parse_errno(what.next("an error")?)?),
        "delay" => Effect::Delay(parse_duration(what.next("a duration")?)?),
        "hang" if target.is_none() => return Err("`hang` is wanted on one device, which goes on later".to_owned()),
        "hang" => Effect::Hang,
        "cost" if *call == Call::Register => parse_cost(&mut what)?,
        "cost" => return Err("registrations alone have a cost; other calls a delay".to_owned()),
        word => return Err(format!("`{word}` is none of fail, delay, hang and cost")),
    };
    let times = if what.take("times") { Some(what.number("count of times")?) } else { None };
    what.end()?;
    if times == Some(0) {
        return Err("`times 0` never happens".to_owned());
    }
    Ok(FaultRule::OnCall { call: *call, target, after, effect, times })
}

fn parse_cost(what: &mut Words<'_>) -> Result<Effect, String> {
    let call = parse_duration(what.next("a duration")?)?;
    what.expect("and")?;
    let per_mib = parse_duration(what.next("a duration")?)?;
    what.expect("a")?;
    what.expect("MiB")?;
    Ok(Effect::Cost { call, per_mib })
}

fn parse_errno(word: &str) -> Result<i32, String> {
    // ENOTSUPP is the kernel's own (include/linux/errno.h): some drivers let it through.
    const ERRORS: [(&str, Errno); 11] = [
        ("enomem", Errno::NOMEM),
        ("einval", Errno::INVAL),
        ("eopnotsupp", Errno::OPNOTSUPP),
        ("enodev", Errno::NODEV),
        ("eio", Errno::IO),
        ("eagain", Errno::AGAIN),
        ("ebusy", Errno::BUSY),
        ("eperm", Errno::PERM),
        ("emfile", Errno::MFILE),
        ("efault", Errno::FAULT),
        ("enotsupp", Errno::from_raw_os_error(524)),
    ];
    let found = ERRORS.iter().find(|(name, _)| *name == word);
    found.map(|(_, errno)| errno.raw_os_error()).ok_or_else(|| {
        let names: Vec<_> = ERRORS.iter().map(|(name, _)| *name).collect();
        format!("`{word}` is no error; {} are", names.join(", "))
    })
}

fn parse_duration(word: &str) -> Result<Duration, String> {
    let digits = word.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = &word[digits.len()..];
    let number: u64 = digits.parse().map_err(|_| format!("`{word}` is no duration such as 20ms"))?;
    let duration = match unit {
        "us" => Duration::from_micros(number),
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        _ => return Err(format!("`{word}` has no unit of us, ms or s")),
    };
    if duration > MAX_DELAY {
        return Err(format!("`{word}` is more than {} s", MAX_DELAY.as_secs()));
    }
    Ok(duration)
}
