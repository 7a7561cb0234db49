{{- define "refill.testSelector" -}}
app.kubernetes.io/name: {{ include "refill.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: test
{{- end }}
