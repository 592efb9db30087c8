//! Pages of one file, for reports. In: a title, style, body, script, data. Out: a document that fetches nothing and says so to the browser;
//! no name in the data can end its element.

use serde_json::Value;

const SHELL: &str = include_str!("page/shell.html");

/// What a page is made of.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    /// Its title.
    pub title: &'a str,
    /// CSS.
    pub style: &'a str,
    /// What stands in the document's body before the script.
    pub body: &'a str,
    /// One script, in a function of its own; its data is the text of the element `data`.
    pub script: &'a str,
}

impl Page<'_> {
    /// The document.
    pub fn text(&self, data: &Value) -> String {
        let parts = [
            ("TITLE", self.title),
            ("STYLE", self.style),
            ("BODY", self.body),
            ("DATA", &inside_script(data)),
            ("SCRIPT", self.script),
        ];
        // A part is looked for behind the one before, so that none is found in another.
        let (mut out, mut rest) = (String::new(), SHELL);
        for (name, part) in parts {
            let (before, behind) = rest.split_once(&format!("/*{name}*/")).unwrap_or((rest, ""));
            out.push_str(before);
            out.push_str(part);
            rest = behind;
        }
        out + rest
    }
}

/// JSON that may stand in a `script` element: no name in it can end the element or open a comment.
fn inside_script(data: &Value) -> String {
    data.to_string().replace('<', "\\u003c")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn nothing_in_the_data_ends_the_script() {
        let hostile = json!({"</script><script>alert(1)//": "<!-- <b>&amp;\u{2028} /*SCRIPT*/"});
        let text = inside_script(&hostile);
        assert!(!text.contains('<'), "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), hostile);
        let page = Page { title: "t", style: "s{}", body: "<main></main>", script: "let x;" }.text(&hostile);
        assert!(page.contains(&text) && page.matches("let x;").count() == 1 && page.ends_with("</html>\n"));
        assert!(page.contains("default-src 'none'"));
    }
}
