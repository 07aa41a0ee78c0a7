//! The part of JSON (RFC 8259) that records are written in: no numbers but whole ones from 0 on.

/// A value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Json {
    Bool(bool),
    Number(u64),
    Text(String),
    List(Vec<Json>),
    Map(Vec<(String, Json)>),
}

/// What was expected instead, and at which byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Expected(pub &'static str, pub usize);

/// Deeper values are nobody's records; a limit keeps them off the stack.
const DEPTH: usize = 8;

/// The value that `text` is.
pub(super) fn parse(text: &str) -> Result<Json, Expected> {
    let mut p = Parser { text, at: 0 };
    let value = p.value(0)?;
    p.space();
    if p.at == text.len() { Ok(value) } else { Err(Expected("the end", p.at)) }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl Parser<'_> {
    fn value(&mut self, depth: usize) -> Result<Json, Expected> {
        if depth == DEPTH {
            return self.fail("a value that is not so deep");
        }
        self.space();
        match self.peek() {
            Some(b'{') => self.list(b'}', |p| p.pair(depth)).map(Json::Map),
            Some(b'[') => self.list(b']', |p| p.value(depth + 1)).map(Json::List),
            Some(b'"') => self.string().map(Json::Text),
            Some(b'0'..=b'9') => self.number().map(Json::Number),
            _ if self.takes("true") => Ok(Json::Bool(true)),
            _ if self.takes("false") => Ok(Json::Bool(false)),
            _ => self.fail("a value"),
        }
    }

    fn pair(&mut self, depth: usize) -> Result<(String, Json), Expected> {
        self.space();
        let key = self.string()?;
        self.space();
        if !self.takes(":") {
            return self.fail("a colon");
        }
        Ok((key, self.value(depth + 1)?))
    }

    /// What stands between a bracket, which is here, and the one that closes it.
    fn list<T>(
        &mut self,
        close: u8,
        mut one: impl FnMut(&mut Self) -> Result<T, Expected>,
    ) -> Result<Vec<T>, Expected> {
        self.at += 1;
        let mut items = Vec::new();
        self.space();
        if self.peek() == Some(close) {
            self.at += 1;
            return Ok(items);
        }
        loop {
            items.push(one(self)?);
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(c) if c == close => {
                    self.at += 1;
                    return Ok(items);
                }
                _ => return self.fail("a comma or the closing bracket"),
            }
        }
    }

    fn string(&mut self) -> Result<String, Expected> {
        if !self.takes("\"") {
            return self.fail("a text");
        }
        let mut out = String::new();
        loop {
            let Some(c) = self.text[self.at..].chars().next() else { return self.fail("the end of a text") };
            match c {
                '"' => {
                    self.at += 1;
                    return Ok(out);
                }
                '\\' => out.push(self.escaped()?),
                c if (c as u32) < 0x20 => return self.fail("an escaped control character"),
                c => {
                    self.at += c.len_utf8();
                    out.push(c);
                }
            }
        }
    }

    fn escaped(&mut self) -> Result<char, Expected> {
        let (c, len) = match self.text.as_bytes().get(self.at + 1) {
            Some(b'"') => (Some('"'), 2),
            Some(b'\\') => (Some('\\'), 2),
            Some(b'n') => (Some('\n'), 2),
            Some(b'u') => {
                let digits = self.text.get(self.at + 2..self.at + 6);
                let digits = digits.filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()));
                (digits.and_then(|d| char::from_u32(u32::from_str_radix(d, 16).ok()?)), 6)
            }
            _ => (None, 0),
        };
        let Some(c) = c else { return self.fail("an escape that records have") };
        self.at += len;
        Ok(c)
    }

    fn number(&mut self) -> Result<u64, Expected> {
        let digits = self.text.as_bytes()[self.at..].iter().take_while(|b| b.is_ascii_digit()).count();
        let text = &self.text[self.at..self.at + digits];
        if text.len() > 1 && text.starts_with('0') {
            return self.fail("a number without a zero before it");
        }
        let Ok(number) = text.parse() else { return self.fail("a number below 2^64") };
        self.at += digits;
        Ok(number)
    }

    fn takes(&mut self, what: &str) -> bool {
        let is = self.text[self.at..].starts_with(what);
        self.at += if is { what.len() } else { 0 };
        is
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.peek() {
            self.at += 1;
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn fail<T>(&self, what: &'static str) -> Result<T, Expected> {
        Err(Expected(what, self.at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_records_are_written_in() {
        let text = r#" {"a":[1, 18446744073709551615,[]],"b":"\"\\\n\u0001é","c":{},"d":true,"e":false} "#;
        let Json::Map(pairs) = parse(text).unwrap() else { panic!("a map") };
        assert_eq!(pairs[0].1, Json::List(vec![Json::Number(1), Json::Number(u64::MAX), Json::List(vec![])]));
        assert_eq!(pairs[1].1, Json::Text("\"\\\n\u{1}é".into()));
        assert_eq!(pairs[2].1, Json::Map(vec![]));
        let refused = [
            "",
            "nul",
            "-1",
            "1.5",
            "01",
            "18446744073709551616",
            "[1,]",
            "[1 2]",
            "{\"a\" 1}",
            "{1:2}",
            "\"\n\"",
            "\"\\x\"",
            "\"\\ud800\"",
            "\"\\u00é\"",
            "\"",
            "[[[[[[[[[1]]]]]]]]]",
            "1 1",
            "{\"a\":1",
        ];
        for text in refused {
            assert!(parse(text).is_err(), "{text}");
        }
        assert_eq!(parse("[1,x]"), Err(Expected("a value", 3)));
    }
}
